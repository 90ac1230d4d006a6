// Gradients and communication of the Reducer against c10d::Reducer and against one process. RN: see
// reducer_buckets_test.cpp.

#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "lockstep/core/error.h"
#include "lockstep/tests/distributed/reducer_nets.h"
#include "lockstep/tests/support/small_net.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::all_equal_to;
using testing::BackendLog;
using testing::CollectiveLog;
using testing::errors_of_ranks;
using testing::linear_loss;
using testing::named;
using testing::named_zeros;
using testing::reduce;
using testing::replicas;
using testing::run_ranks;
using testing::SmallNet;
using testing::throws_with;

/// The gradients of some iterations, and the bytes of each collective.
struct Trace {
  std::vector<at::Tensor> gradients;
  std::vector<int64_t> bytes;
};

template <class Log>
std::vector<int64_t> bytes_since(const Log& log, int64_t rank, size_t start) {
  std::vector<int64_t> bytes;
  const auto calls = log.of_rank(rank);
  for (size_t i = start; i < calls.size(); ++i) bytes.push_back(calls[i].bytes);
  return bytes;
}

at::Tensor batch(const ParallelState& state, int step, int pass) {
  return SmallNet::samples(100 * step + 10 * state.rank() + 5 * pass, 5, at::kFloat);
}

void note_gradients(const SmallNet& net, Trace& trace) {
  for (const at::Tensor& param : net.parameters())
    trace.gradients.push_back(param.grad().detach().clone());
}

constexpr int kSteps = 4;

/// The steps of both reducers: one with accumulation, one onto the averaged gradients, and two
/// more.
template <class Prepare, class Zero, class NoSync>
void take_steps(const ParallelState& state, SmallNet& net, Trace& trace, Prepare prepare, Zero zero,
                NoSync no_sync) {
  for (int step = 0; step < kSteps; ++step) {
    if (step != 2) zero();
    if (step == 1) no_sync([&] { net.loss(batch(state, step, 0)).backward(); });
    prepare([&] { return net.loss(batch(state, step, 1)); }).backward();
    note_gradients(net, trace);
  }
}

Trace run_ours(const ParallelState& state, const CollectiveLog& log,
               const ReducerOptions& options) {
  SmallNet net(4, at::kFloat);
  Reducer reducer(net, replicas(state), options);
  Trace trace;
  const size_t start = log.of_rank(state.rank()).size();
  take_steps(
      state, net, trace,
      [&](const auto& loss) {
        reducer.prepare_for_forward();
        const at::Tensor value = loss();
        reducer.prepare_for_backward({value});
        return value;
      },
      [&] { reducer.zero_grad_buffer(); },
      [&](const auto& accumulate) {
        const auto guard = reducer.no_sync();
        accumulate();
      });
  trace.bytes = bytes_since(log, state.rank(), start);
  EXPECT_EQ(trace.bytes.at(0), 8);  // comparison of hooks, which c10d does not make
  trace.bytes.erase(trace.bytes.begin());
  return trace;
}

Trace run_c10d(const ParallelState& state, const BackendLog& log,
               const std::vector<std::vector<size_t>>& buckets, const ReducerOptions& options) {
  SmallNet net(4, at::kFloat);
  const auto group = c10::intrusive_ptr<c10d::ProcessGroup>::unsafe_reclaim_from_nonowning(
      replicas(state).c10d_group());
  c10d::Reducer reducer(net.parameters(), buckets, group,
                        std::vector<bool>(net.parameters().size(), false),
                        options.bucket_bytes_caps.back(), false, options.gradient_as_bucket_view,
                        {}, options.bucket_bytes_caps.front(), false, false, {});
  Trace trace;
  const size_t start = log.of_rank(state.rank()).size();
  take_steps(
      state, net, trace,
      [&](const auto& loss) {
        reducer.prepare_for_forward();
        reducer.rebuild_buckets();
        const at::Tensor value = loss();
        reducer.prepare_for_backward({value});
        return value;
      },
      [&] {
        for (at::Tensor& param : net.parameters())
          if (param.grad().defined()) param.grad().zero_();
      },
      [&](const auto& accumulate) { accumulate(); });  // not prepared: accumulates
  trace.bytes = bytes_since(log, state.rank(), start);
  return trace;
}

TEST(Reducer, R28GradientsAndCollectivesAreThoseOfC10dAlsoAfterARebuild) {
  for (const int64_t ranks : {2, 3, 4}) {
    for (const bool as_view : {true, false}) {
      for (const int64_t cap : {int64_t{1}, int64_t{100}, int64_t{1} << 30}) {
        CollectiveLog log;
        BackendLog backend_log;
        run_ranks(ranks,
                  [&](const ParallelState& state) {
                    const SmallNet shape(4, at::kFloat);
                    std::vector<std::vector<size_t>> buckets = {{7, 6, 5}, {4, 3, 2, 1, 0}};
                    ReducerOptions options{.bucket_bytes_caps = {cap},
                                           .bucket_indices = buckets,
                                           .gradient_as_bucket_view = as_view};
                    const Trace ours = run_ours(state, log, options);
                    Trace theirs = run_c10d(state, backend_log, buckets, options);
                    ASSERT_EQ(ours.gradients.size(), theirs.gradients.size());
                    for (size_t i = 0; i < ours.gradients.size(); ++i)
                      EXPECT_TRUE(ranks == 2
                                      ? at::equal(ours.gradients[i], theirs.gradients[i])
                                      : at::allclose(ours.gradients[i], theirs.gradients[i], 1e-5))
                          << i;
                    // To rebuild, c10d broadcasts the indices and the number of buckets in one
                    // message of Int, and the sizes of the buckets in another. We send one message
                    // of Long.
                    const auto agreed = ours.bytes.begin() + 2;
                    EXPECT_EQ(*agreed, 64);
                    std::vector<int64_t> reductions(ours.bytes.begin(), agreed);
                    reductions.insert(reductions.end(), agreed + 1, ours.bytes.end());
                    theirs.bytes.erase(theirs.bytes.begin() + 2, theirs.bytes.begin() + 4);
                    EXPECT_EQ(reductions, theirs.bytes);
                  },
                  {.log = &log, .backend_log = &backend_log});
      }
    }
  }
}

TEST(Reducer, R26EveryRankGetsTheMean) {
  run_ranks(2, [](const ParallelState& state) {
    for (const bool as_view : {true, false}) {
      const auto params = named({at::ones({2, 2})});
      Reducer reducer(params, replicas(state), {.gradient_as_bucket_view = as_view});
      const auto rank = static_cast<double>(state.rank());
      reduce(reducer, [&] { return (params[0].tensor + rank).mean(); });
      EXPECT_TRUE(all_equal_to(params[0].tensor.grad(), 0.25));
    }
  });
}

TEST(Reducer, R31R32NoSyncAccumulatesAndAnAveragedGradientIsBuiltUpon) {
  CollectiveLog log;
  run_ranks(2,
            [&](const ParallelState& state) {
              for (const bool as_view : {true, false}) {
                const auto params = named_zeros({3, 2});
                const auto rank = static_cast<double>(state.rank());
                Reducer reducer(params, replicas(state), {.gradient_as_bucket_view = as_view});
                const size_t before = log.of_rank(state.rank()).size();
                {
                  const auto outer = reducer.no_sync();
                  reducer.prepare_for_forward();
                  { const auto inner = reducer.no_sync(); }
                  const at::Tensor loss = linear_loss(params, {0, 1}, 1 + rank);
                  reducer.prepare_for_backward({loss});
                  loss.backward();
                  EXPECT_TRUE(all_equal_to(params[0].tensor.grad(), 1 + rank));
                }
                EXPECT_EQ(log.of_rank(state.rank()).size(), before);
                reduce(reducer, [&] { return linear_loss(params, {0, 1}, 10 + rank); });
                for (const auto& param : params) EXPECT_TRUE(all_equal_to(param.tensor.grad(), 12));
                // The comparison of hooks and the bucket.
                EXPECT_EQ(log.of_rank(state.rank()).size(), before + 2);
                reduce(reducer, [&] { return linear_loss(params, {0, 1}, 1 + rank); });
                for (const auto& param : params)
                  EXPECT_TRUE(all_equal_to(param.tensor.grad(), 13.5));
              }
            },
            {.log = &log});
}

TEST(Reducer, R33EveryPreparedBackwardIsReducedAndOthersAreRefused) {
  for (const bool find_unused : {false, true}) {
    const auto errors = errors_of_ranks(2, [&](const ParallelState& state) {
      const auto params = named_zeros({2});
      const auto rank = static_cast<double>(state.rank());
      Reducer reducer(params, replicas(state), {.find_unused_parameters = find_unused});
      std::vector<at::Tensor> losses;
      for (const double base : {1., 10.}) {
        reducer.prepare_for_forward();
        losses.push_back(linear_loss(params, {0}, base + rank));
        reducer.prepare_for_backward({losses.back()});
      }
      losses[0].backward();
      EXPECT_TRUE(all_equal_to(params[0].tensor.grad(), 1.5));
      losses[1].backward();
      EXPECT_TRUE(all_equal_to(params[0].tensor.grad(), 12));
      linear_loss(params, {0}, 1).backward();
    });
    for (const std::string& error : errors)
      EXPECT_NE(error.find("'p0' received a gradient in a backward that was not prepared"),
                std::string::npos)
          << error;
  }
}

TEST(Reducer, R34TwoForwardsAndOneBackwardEqualTheLocalAverage) {
  for (const bool is_static : {true, false}) {
    run_ranks(2, [&](const ParallelState& state) {
      SmallNet net, local;
      Reducer reducer(net, replicas(state), {.static_graph = is_static});
      for (int step = 0; step < 3; ++step) {
        reducer.zero_grad_buffer();
        at::Tensor loss = at::zeros({}, at::kDouble);
        for (int pass = 0; pass < 2; ++pass) {
          reducer.prepare_for_forward();
          loss = loss + net.loss(batch(state, step, pass).to(at::kDouble));
          reducer.prepare_for_backward({loss});
        }
        loss.backward();
        local.zero_grad();
        for (int64_t rank = 0; rank < 2; ++rank)
          for (int pass = 0; pass < 2; ++pass) {
            const at::Tensor samples =
                SmallNet::samples(100 * step + 10 * rank + 5 * pass, 5, at::kFloat);
            (local.loss(samples.to(at::kDouble)) / 2).backward();
          }
        for (size_t i = 0; i < net.parameters().size(); ++i)
          EXPECT_TRUE(
              at::allclose(net.parameters()[i].grad(), local.parameters()[i].grad(), 1e-12, 1e-13));
      }
    });
  }
}

TEST(Reducer, R35TrainingEqualsOneProcess) {
  for (const int64_t ranks : {2, 3}) {
    run_ranks(ranks, [&](const ParallelState& state) {
      SmallNet net, local;
      Reducer reducer(net, replicas(state), {.bucket_bytes_caps = {1048}});
      const at::NoGradGuard no_grad;
      for (int step = 0; step < 3; ++step) {
        reducer.zero_grad_buffer();
        local.zero_grad();
        {
          const at::AutoGradMode enable(true);
          reduce(reducer, [&] {
            return net.loss(SmallNet::samples(60 * step + 20 * state.rank(), 20)) / 20;
          });
          (local.loss(SmallNet::samples(60 * step, 20 * ranks)) / (20 * ranks)).backward();
        }
        for (size_t i = 0; i < net.parameters().size(); ++i) {
          net.parameters()[i].sub_(net.parameters()[i].grad() * 0.1);
          local.parameters()[i].sub_(local.parameters()[i].grad() * 0.1);
          EXPECT_TRUE(at::allclose(net.parameters()[i], local.parameters()[i], 1e-13, 1e-14));
        }
      }
    });
  }
}

TEST(Reducer, TwoBackwardsMayShareAnIteration) {
  run_ranks(2, [](const ParallelState& state) {
    const auto params = named_zeros({2, 3});
    const auto rank = static_cast<double>(state.rank());
    Reducer reducer(params, replicas(state), {.bucket_bytes_caps = {1}});
    for (int step = 0; step < 3; ++step) {
      reducer.zero_grad_buffer();
      reducer.prepare_for_forward();
      const at::Tensor first = linear_loss(params, {1}, rank);
      const at::Tensor second = linear_loss(params, {0}, 2 * rank);
      reducer.prepare_for_backward({first, second});
      first.backward();
      second.backward();
      reducer.finalize_backward();
      EXPECT_TRUE(all_equal_to(params[1].tensor.grad(), 0.5));
      EXPECT_TRUE(all_equal_to(params[0].tensor.grad(), 1));
    }
  });
}

TEST(Reducer, BucketsHaveTheirOwnDtypeOnRequest) {
  run_ranks(2, [](const ParallelState& state) {
    for (const bool as_view : {true, false}) {
      const auto params = named({at::zeros({3}, at::kBFloat16)});
      Reducer reducer(params, replicas(state),
                      {.gradient_as_bucket_view = as_view, .reduce_dtype = at::kFloat});
      EXPECT_EQ(reducer.buckets()[0].bytes, 12);
      // In bf16 129.5 is 130.
      reduce(reducer, [&] { return linear_loss(params, {0}, state.rank() == 0 ? 256 : 3); });
      const at::Tensor grad = params[0].tensor.grad();
      EXPECT_EQ(grad.scalar_type(), as_view ? at::kFloat : at::kBFloat16);
      EXPECT_TRUE(all_equal_to(grad, as_view ? 129.5 : 130));
    }
    const auto params = named_zeros({4});
    Reducer narrow(params, replicas(state),
                   {.gradient_as_bucket_view = false, .reduce_dtype = at::kBFloat16});
    EXPECT_EQ(narrow.buckets()[0].bytes, 8);
    reduce(narrow, [&] { return linear_loss(params, {0}, 1 + state.rank()); });
    EXPECT_EQ(params[0].tensor.grad().scalar_type(), at::kFloat);
    EXPECT_TRUE(all_equal_to(params[0].tensor.grad(), 1.5));
  });
}

TEST(Reducer, GradientsSetToNoneAndReplacedOnesAreTakenIn) {
  run_ranks(2, [](const ParallelState& state) {
    const auto params = named_zeros({2, 3});
    const auto rank = static_cast<double>(state.rank());
    Reducer reducer(params, replicas(state));
    for (int step = 0; step < 3; ++step) {
      for (const auto& param : params) param.tensor.mutable_grad() = at::Tensor();
      if (step == 2) params[0].tensor.mutable_grad() = at::full({2}, rank);
      reduce(reducer, [&] { return linear_loss(params, {0, 1}, 1 + rank); });
      EXPECT_TRUE(all_equal_to(params[0].tensor.grad(), step == 2 ? 2 : 1.5));
      EXPECT_TRUE(all_equal_to(params[1].tensor.grad(), 1.5));
    }
    reducer.zero_grad_buffer();
    EXPECT_TRUE(all_equal_to(params[0].tensor.grad(), 0));
  });
}

TEST(Reducer, TheModuleGoesOnWorkingWhenTheReducerIsGone) {
  const auto params = named_zeros({2});
  {
    Reducer reducer(params, replicas(ParallelState::single_process()));
    reduce(reducer, [&] { return linear_loss(params, {0}, 1); });
  }
  linear_loss(params, {0}, 1).backward();
  EXPECT_TRUE(all_equal_to(params[0].tensor.grad(), 2));
}

TEST(Reducer, NanIsRefusedBeforeItIsSent) {
  const auto params = named_zeros({2});
  Reducer reducer(params, replicas(ParallelState::single_process()),
                  {.check_for_nan_in_grad = true});
  EXPECT_TRUE(throws_with<UsageError>(
      [&] { reduce(reducer, [&] { return linear_loss(params, {0}, NAN); }); },
      "the gradient of 'p0' on this rank has 2 elements of 2 that are NaN"));
  EXPECT_TRUE(throws_with<UsageError>([&] { reducer.prepare_for_forward(); },
                                      "an earlier call failed: gradient sync"));
}

}  // namespace
}  // namespace lockstep
