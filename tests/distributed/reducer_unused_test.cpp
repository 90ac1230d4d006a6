// Unused parameters, static graphs, recomputation. RN: see reducer_buckets_test.cpp.

#include <gtest/gtest.h>

#include "lockstep/core/error.h"
#include "lockstep/tests/distributed/reducer_nets.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::all_equal_to;
using testing::CollectiveLog;
using testing::errors_of_ranks;
using testing::linear_loss;
using testing::named;
using testing::named_zeros;
using testing::NoGradient;
using testing::Recomputed;
using testing::reduce;
using testing::replicas;
using testing::run_ranks;
using testing::throws_with;

using Counts = std::vector<int32_t>;

TEST(Reducer, R36AParameterThatOneRankUses) {
  for (const bool with_outputs : {true, false})
    for (const bool as_view : {true, false})
      run_ranks(2, [&](const ParallelState& state) {
        const auto params = named({at::ones({2, 2}), at::ones({2, 2})});
        Reducer reducer(params, replicas(state),
                        {.find_unused_parameters = true, .gradient_as_bucket_view = as_view});
        reducer.prepare_for_forward();
        at::Tensor y = at::ones({1, 2}).matmul(params[0].tensor);
        if (state.rank() == 1) y = y.matmul(params[1].tensor);
        const at::Tensor loss = y.sum();
        reducer.prepare_for_backward(with_outputs ? std::vector{loss} : std::vector<at::Tensor>());
        loss.backward();
        EXPECT_EQ(reducer.used_counts(), (Counts{2, 1}));
        EXPECT_TRUE(all_equal_to(params[0].tensor.grad(), 1.5));
        EXPECT_TRUE(all_equal_to(params[1].tensor.grad(), 1));
      });
}

TEST(Reducer, R37R38R39GloballyUnusedGradientsStayWhatTheyWere) {
  for (const bool as_view : {true, false})
    for (const bool same_on_all : {true, false}) {
      CollectiveLog log;
      run_ranks(
          3,
          [&](const ParallelState& state) {
            const auto params = named_zeros({3, 2});
            const auto rank = static_cast<double>(state.rank());
            Reducer reducer(params, replicas(state),
                            {.find_unused_parameters = true, .gradient_as_bucket_view = as_view});
            double expected = 0;
            for (int step = 0; step < 6; ++step) {
              const bool used = step % 2 == 1 && (same_on_all || state.rank() == 1);
              const size_t before = log.of_rank(state.rank()).size();
              reduce(reducer, [&] {
                return linear_loss(
                    params, used ? std::vector<size_t>{0, 1} : std::vector<size_t>{0}, 0.3 + rank);
              });
              EXPECT_EQ(reducer.used_counts(), (Counts{3, step % 2 == 0 ? 0
                                                          : same_on_all ? 3
                                                                        : 1}));
              const at::Tensor grad = params[1].tensor.grad();
              if (step == 0) {
                EXPECT_FALSE(grad.defined());
              } else if (step % 2 == 1) {
                expected += same_on_all ? 1.3 : 1.3 / 3;
                EXPECT_TRUE(at::allclose(grad, at::full({2}, expected)));
              }
              const at::Tensor kept = grad.defined() ? grad.clone() : grad;
              if (step == 1) {  // to the last bit
                reduce(reducer, [&] { return linear_loss(params, {0}, 1); });
                EXPECT_TRUE(at::equal(params[1].tensor.grad(), kept));
              }
              const auto calls = log.of_rank(state.rank());
              const size_t first = before + (step == 0 ? 1 : 0);  // after the comparison of hooks
              EXPECT_EQ(calls[first].bytes, 20);                  // the bucket
              EXPECT_EQ(calls[first + 1].bytes, 8);               // which parameters are used
            }
          },
          {.log = &log});
    }
}

TEST(Reducer, R40MissingGradientsAreNamedOnEveryRank) {
  for (const bool at_once : {true, false}) {
    const auto errors = errors_of_ranks(2, [&](const ParallelState& state) {
      const auto params = named_zeros({2, 3});
      Reducer reducer(params, replicas(state));
      reduce(reducer, [&] {
        return linear_loss(
            params, state.rank() == 1 ? std::vector<size_t>{0} : std::vector<size_t>{0, 1}, 1);
      });
      if (at_once)
        reducer.finalize_backward();
      else
        reducer.prepare_for_forward();
    });
    EXPECT_TRUE(errors[1].starts_with(
        "Reducer: the reduction of the prior iteration (1) has not finished: 1 of 2 parameters "
        "received no gradient: 1 ('p1'); make sure that the loss depends on all outputs, or set "
        "find_unused_parameters"))
        << errors[1];
    EXPECT_NE(errors[0].find("1 of 2 parameters received no gradient: 1 ('p1')"), std::string::npos)
        << errors[0];
  }
}

TEST(Reducer, R41UndefinedGradientsCountAsUnused) {
  run_ranks(2, [](const ParallelState& state) {
    const auto params = named_zeros({2, 3});
    Reducer reducer(params, replicas(state), {.find_unused_parameters = true});
    for (int step = 0; step < 3; ++step) {
      reducer.zero_grad_buffer();
      reduce(reducer, [&] {
        return linear_loss(params, {0}, 1) + NoGradient::apply(params[1].tensor).sum();
      });
      EXPECT_TRUE(all_equal_to(params[0].tensor.grad(), 1));
      EXPECT_FALSE(params[1].tensor.grad().defined());
    }
  });
}

TEST(Reducer, R42R43SkippedBucketsAreNotReducedAndTheirGradientsStay) {
  CollectiveLog log;
  run_ranks(2,
            [&](const ParallelState& state) {
              for (const bool skip : {false, true}) {
                const auto params = named({at::zeros({5000, 100}), at::zeros({100, 100})});
                Reducer reducer(params, replicas(state),
                                {.bucket_bytes_caps = {1572864},
                                 .find_unused_parameters = true,
                                 .skip_all_reduce_unused_params = skip});
                reduce(reducer, [&] { return linear_loss(params, {0, 1}, 1); });
                EXPECT_EQ(reducer.logging_data().integers.at("num_buckets_reduced"), 2);
                for (int step = 0; step < 3; ++step) {
                  reduce(reducer, [&] { return linear_loss(params, {0}, 1); });
                  EXPECT_EQ(reducer.logging_data().integers.at("num_buckets_reduced"),
                            skip ? 1 : 2);
                  EXPECT_TRUE(all_equal_to(params[1].tensor.grad(), 1));
                  EXPECT_TRUE(all_equal_to(params[0].tensor.grad(), 2 + step));
                  const int64_t unused = log.of_rank(state.rank()).back().bytes;
                  EXPECT_EQ(unused, 8);
                }
              }
            },
            {.log = &log});
}

TEST(Reducer, OnlyOneRankUsesAnything) {
  run_ranks(2, [](const ParallelState& state) {
    const auto params = named_zeros({2, 3});
    Reducer reducer(params, replicas(state), {.find_unused_parameters = true});
    for (int step = 0; step < 2; ++step) {
      reducer.zero_grad_buffer();
      at::Tensor input = at::ones({}, at::kDouble).requires_grad_(true);
      reduce(reducer, [&] {
        return state.rank() == 0 ? linear_loss(params, {0, 1}, 4) + input : input * 2;
      });
      EXPECT_TRUE(all_equal_to(params[1].tensor.grad(), 2));
    }
  });
}

TEST(Reducer, R44AChangedGraphIsRefusedIfItIsStatic) {
  const auto train = [](const std::vector<size_t>& first, const std::vector<size_t>& second) {
    const auto params = named_zeros({2, 3});
    Reducer reducer(params, replicas(ParallelState::single_process()), {.static_graph = true});
    reduce(reducer, [&] { return linear_loss(params, first, 1); });
    reduce(reducer, [&] { return linear_loss(params, second, 1); });
    reducer.prepare_for_forward();
  };
  EXPECT_TRUE(throws_with<UsageError>(
      [&] {
        train({0}, {0, 1});
      },
      "training graph has changed in this iteration: parameter 1"));
  EXPECT_TRUE(throws_with<UsageError>(
      [&] {
        train({0, 1}, {0});
      },
      "the reduction of the prior iteration (2) has not finished"));
  EXPECT_NO_THROW(train({0}, {0}));
}

TEST(Reducer, R46AChangingUnusedSetIsNoticed) {
  const auto is_static = [](bool alternates) {
    const auto params = named_zeros({2, 3});
    Reducer reducer(params, replicas(ParallelState::single_process()),
                    {.find_unused_parameters = true});
    for (int step = 0; step < 4; ++step)
      reduce(reducer, [&] {
        const bool all = alternates && step % 2 == 1;
        return linear_loss(params, all ? std::vector<size_t>{0, 1} : std::vector<size_t>{0}, 1);
      });
    return reducer.ddp_graph_static();
  };
  EXPECT_TRUE(is_static(false));
  EXPECT_FALSE(is_static(true));
}

TEST(Reducer, R47ASharedParameterMayBeUnused) {
  struct Shared : torch::nn::Module {
    Shared() {
      weight = register_parameter("weight", at::ones({2}));
      bias = register_parameter("bias", at::ones({3}));
      again = register_module("net1", std::make_shared<torch::nn::Module>());
      again->register_parameter("bias", bias);
    }
    at::Tensor weight, bias;
    std::shared_ptr<torch::nn::Module> again;
  };
  for (const bool is_static : {true, false})
    run_ranks(2, [&](const ParallelState& state) {
      Shared net;
      Reducer reducer(net, replicas(state),
                      {.find_unused_parameters = !is_static, .static_graph = is_static});
      for (int step = 0; step < 3; ++step) {
        reducer.zero_grad_buffer();
        reduce(reducer, [&] { return (net.weight * (1. + state.rank())).sum(); });
        EXPECT_TRUE(all_equal_to(net.weight.grad(), 1.5));
        EXPECT_FALSE(net.bias.grad().defined());
      }
    });
}

/// The gradient of p0 after three iterations. `parts` recomputed parts use p0; p1 is used outside
/// of them.
double recomputed_gradient(const ParallelState& state, int parts, const ReducerOptions& options) {
  const auto params = named({at::full({2}, 3.), at::ones({2})});
  Reducer reducer(params, replicas(state), options);
  for (int step = 0; step < 3; ++step) {
    reducer.zero_grad_buffer();
    reduce(reducer, [&] {
      at::Tensor y = params[1].tensor * (1. + state.rank());
      for (int part = 0; part < parts; ++part) y = Recomputed::apply(y, &params[0].tensor);
      return y.sum();
    });
  }
  return params[0].tensor.grad()[0].item<double>();
}

TEST(Reducer, R48R49R50RecomputedParts) {
  run_ranks(2, [](const ParallelState& state) {
    EXPECT_EQ(recomputed_gradient(state, 1, {}), 1.5);
    EXPECT_EQ(recomputed_gradient(state, 1, {.static_graph = true}), 1.5);
    EXPECT_EQ(recomputed_gradient(state, 2, {.static_graph = true}), 2 * 3 * 1.5);
    EXPECT_EQ(
        recomputed_gradient(state, 2, {.static_graph = true, .gradient_as_bucket_view = false}),
        2 * 3 * 1.5);
  });
  const std::pair<int, ReducerOptions> refused[] = {{1, {.find_unused_parameters = true}}, {2, {}}};
  for (const auto& [parts, options] : refused) {
    const auto errors =
        errors_of_ranks(2, [&, n = parts, &o = options](const ParallelState& state) {
          recomputed_gradient(state, n, o);
        });
    for (const std::string& error : errors)
      EXPECT_NE(error.find("mark a variable ready only once: parameter 0 ('p0')"),
                std::string::npos)
          << error;
  }
}

TEST(Reducer, AStaticGraphWithUnusedParametersRebuildsAndReportsThem) {
  run_ranks(2, [](const ParallelState& state) {
    const auto params = named_zeros({2, 3, 4});
    Reducer reducer(params, replicas(state), {.bucket_bytes_caps = {1}, .static_graph = true});
    for (int step = 0; step < 3; ++step) {
      reducer.zero_grad_buffer();
      reduce(reducer, [&] {
        return linear_loss(
            params, state.rank() == 0 ? std::vector<size_t>{2, 0} : std::vector<size_t>{0}, 2);
      });
      EXPECT_TRUE(all_equal_to(params[0].tensor.grad(), 2));
      EXPECT_FALSE(params[1].tensor.grad().defined());
      EXPECT_TRUE(all_equal_to(params[2].tensor.grad(), 1));
      EXPECT_EQ(reducer.used_counts(), (Counts{2, 0, 1}));
    }
    EXPECT_EQ(reducer.bucket_indices(), (std::vector<std::vector<size_t>>{{0}, {2}, {1}}));
    EXPECT_EQ(reducer.logging_data().integers.at("unused_parameter_size"),
              state.rank() == 0 ? 12 : 28);
  });
}

}  // namespace
}  // namespace lockstep
