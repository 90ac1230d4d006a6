// Sparse gradients of the Reducer. RN: see reducer_buckets_test.cpp.

#include <gtest/gtest.h>

#include <torch/nn/modules/embedding.h>

#include "lockstep/core/error.h"
#include "lockstep/distributed/power_sgd_hook.h"
#include "lockstep/distributed/reducer_bucket.h"
#include "lockstep/distributed/sparse_all_reduce.h"
#include "lockstep/tests/distributed/reducer_nets.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::all_equal_to;
using testing::CollectiveLog;
using testing::named;
using testing::NoGradient;
using testing::reduce;
using testing::replicas;
using testing::run_ranks;
using testing::throws_with;

struct Bag : torch::nn::Module {
  Bag() {
    auto options = torch::nn::EmbeddingBagOptions(10, 3).sparse(true).mode(torch::kSum);
    bag = register_module("bag", torch::nn::EmbeddingBag(options));
    weight = register_parameter("weight", at::ones({3}));
    const at::NoGradGuard no_grad;
    bag->weight.copy_(at::arange(30).view({10, 3}) / 10.);
  }
  at::Tensor loss(int64_t rank) {
    const at::Tensor rows = at::tensor({rank, rank + 1, int64_t{7}, int64_t{7}}, at::kLong);
    return (bag(rows.view({2, 2})) * weight).square().sum();
  }
  torch::nn::EmbeddingBag bag = nullptr;
  at::Tensor weight;
};

TEST(SparseGradients, R59EqualOneProcess) {
  for (const bool as_view : {true, false})
    for (const int hook : {0, 1, 2})
      run_ranks(3, [&](const ParallelState& state) {
        Bag net, local;
        Reducer reducer(net, replicas(state), {.gradient_as_bucket_view = as_view});
        if (hook == 1) reducer.register_comm_hook(std::make_shared<AllReduceHook>());
        if (hook == 2) reducer.register_comm_hook(std::make_shared<PowerSgdHook>());
        for (int step = 0; step < 3; ++step) {
          reducer.zero_grad_buffer();
          reduce(reducer, [&] { return net.loss(state.rank() + step); });
          local.zero_grad();
          at::Tensor loss = at::zeros({});
          for (int64_t rank = 0; rank < 3; ++rank) loss = loss + local.loss(rank + step) / 3;
          loss.backward();
          const at::Tensor grad = net.bag->weight.grad();
          ASSERT_EQ(grad.layout(), at::kSparse);
          EXPECT_TRUE(grad.is_coalesced());
          EXPECT_TRUE(at::allclose(grad.to_dense(), local.bag->weight.grad().to_dense(), 1e-5));
          EXPECT_TRUE(at::allclose(net.weight.grad(), local.weight.grad(), 1e-5));
        }
        EXPECT_EQ(reducer.buckets().size(), 2u);
      });
}

TEST(SparseGradients, R60R61RowsAreAddedWithAndWithoutMetadata) {
  CollectiveLog log;
  run_ranks(2,
            [&](const ParallelState& state) {
              const auto params = named({at::ones({4, 2})});
              Reducer reducer(params, replicas(state), {.sparse_parameters = {"p0"}});
              for (const bool with_metadata : {false, true}) {
                params[0].tensor.mutable_grad() = at::Tensor();
                if (with_metadata)
                  reducer.set_sparse_metadata({{"p0", at::tensor({0, 1, 3}, at::kLong)}});
                const size_t before = log.of_rank(state.rank()).size();
                const at::Tensor rows = at::tensor({state.rank(), int64_t{1}}, at::kLong);
                reduce(reducer, [&] {
                  return at::embedding(params[0].tensor, rows, -1, false, true).sum();
                });
                EXPECT_TRUE(at::equal(params[0].tensor.grad().to_dense().select(1, 0),
                                      at::tensor({0.5, 1.5, 0., 0.}, at::kFloat)));
                const auto calls = log.of_rank(state.rank());
                std::vector<int64_t> bytes;
                for (size_t i = before; i < calls.size(); ++i) bytes.push_back(calls[i].bytes);
                if (with_metadata)  // the order of gradients, then rows times two columns
                  EXPECT_EQ(bytes, (std::vector<int64_t>{8, 24}));
                else  // the comparison of hooks, then number of entries, indices, values
                  EXPECT_EQ(bytes, (std::vector<int64_t>{8, 8, 16, 16}));
              }
              reducer.set_sparse_metadata({{"p0", at::tensor({3}, at::kLong)}});
            },
            {.log = &log});
  for (const int64_t ranks : {2, 4})
    run_ranks(ranks, [&](const ParallelState& state) {
      const at::Tensor indices = at::arange(state.rank() + 1).unsqueeze(0);
      const at::Tensor mine =
          at::sparse_coo_tensor(indices, at::ones({state.rank() + 1, 2}), {ranks, 2});
      const at::Tensor sum =
          start_sparse_all_reduce(replicas(state), mine, at::Tensor(), 1, "rows")().to_dense();
      for (int64_t i = 0; i < ranks; ++i)
        EXPECT_TRUE(all_equal_to(sum[i], static_cast<double>(ranks - i)));
    });
}

TEST(SparseGradients, AreRefusedWhereTheyCannotBe) {
  const ProcessGroup group = replicas(ParallelState::single_process());
  const auto meta = named({at::ones({4, 2}, at::kMeta)});
  EXPECT_TRUE(throws_with<ConfigError>([&] { Reducer(meta, group, {.sparse_parameters = {"p0"}}); },
                                       "'p0' is on meta; NCCL does not reduce sparse gradients"));
  const auto params = named({at::ones({4, 2})});
  EXPECT_TRUE(throws_with<ConfigError>(
      [&] { Reducer(params, group, {.sparse_parameters = {"p1"}}); }, "found 'p1'"));
  Reducer dense(params, group);
  const at::Tensor rows = at::arange(2);
  EXPECT_TRUE(throws_with<UsageError>(
      [&] {
        reduce(dense, [&] { return at::embedding(params[0].tensor, rows, -1, false, true).sum(); });
      },
      "the gradient of 'p0' is sparse"));
  const auto others = named({at::ones({4, 2})});
  Reducer sparse(others, group, {.sparse_parameters = {"p0"}});
  EXPECT_TRUE(throws_with<UsageError>(
      [&] { reduce(sparse, [&] { return others[0].tensor.sum(); }); }, "'p0' is dense"));
  const auto third = named({at::ones({4, 2})});
  Reducer metadata(third, group, {.sparse_parameters = {"p0"}});
  metadata.set_sparse_metadata({{"p0", at::tensor({0}, at::kLong)}});
  EXPECT_TRUE(throws_with<UsageError>(
      [&] {
        reduce(metadata,
               [&] { return at::embedding(third[0].tensor, rows, -1, false, true).sum(); });
      },
      "row 1, which is not in the sparse metadata"));
}

TEST(SparseGradients, OfAnUnusedParameterAreOnItsDevice) {
  const auto meta = named({at::ones({4, 2}, at::kMeta)});
  const ReducerBucket::Settings settings{.group = replicas(ParallelState::single_process())};
  ReducerBucket bucket(meta, /*sparse=*/true, settings, 0, true);
  bucket.take_zeros();
  bucket.give(0, true);
  const at::Tensor grad = meta[0].tensor.grad();
  EXPECT_TRUE(grad.is_coalesced());
  EXPECT_TRUE(grad.indices().is_meta());
  EXPECT_TRUE(grad.values().is_meta());
  EXPECT_EQ(grad.sizes(), meta[0].tensor.sizes());
}

/// The rows of a table with sparse gradients.
at::Tensor rows_of(const at::Tensor& table, const at::Tensor& rows) {
  return at::embedding(table, rows, -1, false, /*sparse=*/true);
}

TEST(SparseGradients, UndefinedOnesCountAsZeros) {
  for (const bool as_view : {true, false})
    for (const bool finds_unused : {true, false})
      run_ranks(2, [&](const ParallelState& state) {
        const auto params = named({at::ones({4, 2})});
        const at::Tensor& table = params[0].tensor;
        Reducer reducer(params, replicas(state),
                        {.find_unused_parameters = finds_unused,
                         .gradient_as_bucket_view = as_view,
                         .sparse_parameters = {"p0"}});
        const at::Tensor rows = at::tensor({1, 3}, at::kLong);
        for (const int ranks_with_gradients : {1, 0, 2}) {
          reducer.zero_grad_buffer();
          reduce(reducer, [&] {
            const at::Tensor out = rows_of(table, rows);
            return (state.rank() < ranks_with_gradients ? out : NoGradient::apply(out)).sum();
          });
          if (finds_unused) {
            EXPECT_EQ(reducer.used_counts(), std::vector<int32_t>{ranks_with_gradients});
          }
          const double mean = ranks_with_gradients / 2.;
          if (finds_unused && ranks_with_gradients == 0)
            EXPECT_FALSE(table.grad().defined());
          else
            EXPECT_TRUE(at::equal(table.grad().to_dense().select(1, 0),
                                  at::tensor({0., mean, 0., mean}, at::kFloat)));
        }
      });
}

TEST(SparseGradients, NanIsRefusedBeforeItIsSent) {
  for (const bool hooked : {false, true}) {  // a hook may want to see it
    const auto params = named({at::ones({4, 2})});
    Reducer reducer(params, replicas(ParallelState::single_process()),
                    {.sparse_parameters = {"p0"}, .check_for_nan_in_grad = true});
    if (hooked) reducer.register_comm_hook(std::make_shared<AllReduceHook>());
    const auto iterate = [&](double factor) {
      reduce(reducer, [&] {
        const at::Tensor factors = at::ones({2, 2});
        factors[1][0].fill_(factor);
        return (rows_of(params[0].tensor, at::tensor({1, 3}, at::kLong)) * factors).sum();
      });
    };
    iterate(2);
    if (hooked)
      EXPECT_NO_THROW(iterate(NAN));
    else
      EXPECT_TRUE(throws_with<UsageError>(
          [&] { iterate(NAN); },
          "bucket 0 ('p0' to 'p0'): the gradient of 'p0' on this rank has 1 elements of 4 that are "
          "NaN or infinite, the first in row 3: "));
  }
}

/// One table under two names: of one module, or of two modules that share their weight.
struct TwoNames : torch::nn::Module {
  explicit TwoNames(bool one_module) {
    auto options = torch::nn::EmbeddingOptions(4, 2).sparse(true);
    source = register_module("src", torch::nn::Embedding(options));
    options._weight(source->weight);
    target = register_module("tgt", one_module ? source : torch::nn::Embedding(options));
  }
  torch::nn::Embedding source = nullptr, target = nullptr;
};

TEST(SparseGradients, OfATableWithTwoNamesAreThoseOfTheFirst) {
  for (const bool one_module : {true, false})
    run_ranks(2, [&](const ParallelState& state) {
      TwoNames net(one_module);
      Reducer reducer(net, replicas(state));
      ASSERT_EQ(reducer.buckets().size(), 1u);
      EXPECT_EQ(reducer.buckets()[0].parameters, std::vector<std::string>{"src.weight"});
      const at::Tensor row = at::tensor({state.rank()}, at::kLong);
      for (int step = 0; step < 2; ++step) {
        reducer.zero_grad_buffer();
        reduce(reducer, [&] { return (net.source(row) + net.target(row + 1)).sum(); });
        const at::Tensor grad = net.source->weight.grad();
        ASSERT_EQ(grad.layout(), at::kSparse);
        EXPECT_TRUE(
            at::equal(grad.to_dense().select(1, 0), at::tensor({0.5, 1., 0.5, 0.}, at::kFloat)));
      }
    });
}

TEST(SparseGradients, UnusedOnSomeRanks) {
  run_ranks(2, [](const ParallelState& state) {
    const auto params = named({at::ones({4, 2}), at::ones({2})});
    Reducer reducer(params, replicas(state),
                    {.find_unused_parameters = true, .sparse_parameters = {"p0"}});
    for (int step = 0; step < 2; ++step) {
      reducer.zero_grad_buffer();
      reduce(reducer, [&] {
        at::Tensor loss = params[1].tensor.sum();
        if (state.rank() == 1 && step == 1)
          loss = loss + at::embedding(params[0].tensor, at::arange(1), -1, false, true).sum();
        return loss;
      });
      if (step == 0) {
        EXPECT_FALSE(params[0].tensor.grad().defined());
      } else {
        EXPECT_EQ(params[0].tensor.grad().to_dense()[0][0].item<double>(), 0.5);
      }
      EXPECT_TRUE(all_equal_to(params[1].tensor.grad(), 1));
    }
  });
}

}  // namespace
}  // namespace lockstep
