// Communication hooks. RN: see reducer_buckets_test.cpp.

#include <gtest/gtest.h>

#include <chrono>
#include <optional>

#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "lockstep/core/error.h"
#include "lockstep/distributed/power_sgd_hook.h"
#include "lockstep/parallel_state/cpu_traits.h"
#include "lockstep/tests/distributed/reducer_nets.h"
#include "lockstep/tests/support/c10d_reducer.h"
#include "lockstep/tests/support/small_net.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::all_equal_to;
using testing::CollectiveLog;
using testing::linear_loss;
using testing::named;
using testing::named_zeros;
using testing::reduce;
using testing::replicas;
using testing::run_ranks;
using testing::SmallNet;
using testing::throws_with;

/// The gradients after two steps of a net with `hook`.
std::vector<at::Tensor> gradients_with(const ParallelState& state, std::shared_ptr<CommHook> hook) {
  SmallNet net(4, at::kFloat);
  Reducer reducer(net, replicas(state), {.bucket_bytes_caps = {100}});
  if (hook) reducer.register_comm_hook(std::move(hook));
  for (int step = 0; step < 2; ++step) {
    reducer.zero_grad_buffer();
    reduce(reducer, [&] {
      return net.loss(SmallNet::samples(100 * step + 10 * state.rank(), 5, at::kFloat));
    });
  }
  std::vector<at::Tensor> result;
  for (const at::Tensor& param : net.parameters()) result.push_back(param.grad().clone());
  return result;
}

TEST(CommHooks, R27AHookOfTheUsersIsChained) {
  run_ranks(2, [](const ParallelState& state) {
    const auto ones = std::make_shared<FunctionHook>("ones", [](const GradBucket& bucket) {
      return [buffer = bucket.buffer] { return at::ones_like(buffer); };
    });
    const auto plus_one =
        std::make_shared<FunctionHook>("plus-one(ones)", [ones](const GradBucket& bucket) {
          return [finish = ones->start(bucket)] { return finish() + 1; };
        });
    for (const bool as_view : {true, false}) {
      const auto params = named({at::ones({2, 2})});
      Reducer reducer(params, replicas(state), {.gradient_as_bucket_view = as_view});
      reducer.register_comm_hook(plus_one);
      EXPECT_EQ(reducer.logging_data().strings.at("comm_hook"), "plus-one(ones)");
      reduce(reducer, [&] { return (params[0].tensor + 1).mean(); });
      EXPECT_TRUE(all_equal_to(params[0].tensor.grad(), 2));
    }
  });
}

TEST(CommHooks, R28TheAllReduceHookEqualsNone) {
  run_ranks(3, [](const ParallelState& state) {
    const auto without = gradients_with(state, nullptr);
    const auto with = gradients_with(state, std::make_shared<AllReduceHook>());
    for (size_t i = 0; i < with.size(); ++i) EXPECT_TRUE(at::equal(with[i], without[i]));
  });
}

TEST(CommHooks, R29AHookIsRegisteredOnce) {
  Reducer reducer(named_zeros({1}), replicas(ParallelState::single_process()));
  reducer.register_comm_hook(std::make_shared<AllReduceHook>());
  EXPECT_TRUE(throws_with<UsageError>(
      [&] { reducer.register_comm_hook(std::make_shared<AllReduceHook>()); },
      "can only be called once; 'all-reduce' is there"));
}

TEST(CommHooks, NoHookOnOneRankEndsAllAtOnce) {
  for (const bool in_first_iteration : {true, false}) {
    const auto start = std::chrono::steady_clock::now();
    const auto errors =
        testing::errors_of_ranks(2,
                                 [&](const ParallelState& state) {
                                   const auto params = named_zeros({1});
                                   Reducer reducer(params, replicas(state));
                                   if (!in_first_iteration)
                                     reduce(reducer, [&] { return linear_loss(params, {0}, 1); });
                                   std::shared_ptr<CommHook> hook;
                                   if (state.rank() == 0) hook = std::make_shared<AllReduceHook>();
                                   reducer.register_comm_hook(hook);
                                   reduce(reducer, [&] { return linear_loss(params, {0}, 1); });
                                 },
                                 {.timeout = std::chrono::seconds(30)});
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(15));
    EXPECT_NE(errors[0].find("rank 1: register_comm_hook: found no hook"), std::string::npos)
        << errors[0];
    EXPECT_NE(errors[1].find("register_comm_hook: found no hook"), std::string::npos) << errors[1];
  }
}

TEST(CommHooks, AHookThatCannotBeCalledIsRefused) {
  EXPECT_TRUE(throws_with<ConfigError>([] { FunctionHook("mine", nullptr); },
                                       "hook 'mine': found no function"));
  EXPECT_TRUE(throws_with<ConfigError>([] { CompressHook(at::kHalf, nullptr); },
                                       "compress hook: found no inner hook"));
}

TEST(CommHooks, R30CompressedGradientsAreThoseOfC10dAndHalfTheBytes) {
  CollectiveLog log;
  run_ranks(
      2,
      [&](const ParallelState& state) {
        const auto params = named({at::zeros({40})}), theirs = named({at::zeros({40})});
        Reducer reducer(params, replicas(state));
        reducer.register_comm_hook(std::make_shared<CompressHook>(at::kHalf));
        c10d::Reducer oracle =
            testing::make_c10d_reducer({theirs[0].tensor}, {{0}}, replicas(state));
        oracle.register_builtin_comm_hook(c10d::BuiltinCommHookType::FP16_COMPRESS);
        const at::Tensor input = at::sin(at::arange(40) * (1. + state.rank()));
        const size_t before = log.of_rank(state.rank()).size();
        reduce(reducer, [&] { return params[0].tensor.dot(input); });
        EXPECT_EQ(log.of_rank(state.rank()).at(before).operation, "all_gather");  // of hooks
        EXPECT_EQ(log.of_rank(state.rank()).at(before).bytes, 8);
        EXPECT_EQ(log.of_rank(state.rank()).at(before + 1).bytes, 80);
        EXPECT_EQ(log.of_rank(state.rank()).at(before + 1).dtype, "Half");
        oracle.prepare_for_forward();
        const at::Tensor loss = theirs[0].tensor.dot(input);
        oracle.prepare_for_backward({loss});
        loss.backward();
        EXPECT_EQ(params[0].tensor.grad().scalar_type(), at::kFloat);
        EXPECT_TRUE(at::allclose(params[0].tensor.grad(), theirs[0].tensor.grad(), 1e-3, 1e-3));
        EXPECT_FALSE(at::equal(params[0].tensor.grad(), at::zeros({40})));
      },
      {.log = &log});
}

TEST(CommHooks, Bfloat16RoundsTheAverageOnce) {
  // 129.5 lies between the bf16 numbers 129 and 130. In bf16, 256 + 1 is 256.
  const std::pair<std::vector<double>, double> cases[] = {{{256, 3}, 130}, {{256, 1, 1}, 86}};
  for (const auto& [terms, average] : cases) {
    if (terms.size() > 2 && !sums_in_rank_order()) continue;  // plain Gloo adds in bf16
    CollectiveLog log;
    run_ranks(static_cast<int64_t>(terms.size()),
              [&, &of_ranks = terms, expected = average](const ParallelState& state) {
                const auto params = named_zeros({3});
                Reducer reducer(params, replicas(state));
                reducer.register_comm_hook(std::make_shared<CompressHook>(at::kBFloat16));
                const double term = of_ranks[static_cast<size_t>(state.rank())];
                reduce(reducer, [&] { return linear_loss(params, {0}, term); });
                EXPECT_TRUE(all_equal_to(params[0].tensor.grad(), expected))
                    << params[0].tensor.grad();
                const CollectiveRecord sent = log.of_rank(state.rank()).back();
                EXPECT_EQ(sent.dtype, "BFloat16");
                EXPECT_EQ(sent.bytes, 6);
              },
              {.log = &log});
  }
  EXPECT_TRUE(throws_with<ConfigError>([] { (void)CompressHook(at::kFloat); }, "found Float"));
}

TEST(CommHooks, R6BucketsAreNumberedRightFromTheFirstIterationOn) {
  for (const bool is_static : {true, false}) {
    std::vector<std::string> calls;
    const auto note = std::make_shared<FunctionHook>("note", [&](const GradBucket& bucket) {
      calls.push_back(std::to_string(bucket.index) + (bucket.is_last ? " last" : "") + " " +
                      bucket.parameters->front().name);
      for (const at::Tensor& gradient : bucket.gradients()) EXPECT_TRUE(all_equal_to(gradient, 1));
      return AllReduceHook().start(bucket);
    });
    const auto params = named_zeros({2, 3, 4});
    Reducer reducer(params, replicas(ParallelState::single_process()),
                    {.bucket_bytes_caps = {1}, .static_graph = is_static});
    reducer.register_comm_hook(note);
    for (int step = 0; step < 2; ++step) {
      reducer.zero_grad_buffer();
      reduce(reducer, [&] { return linear_loss(params, {0, 1, 2}, 1); });
    }
    const std::vector<std::string> once = {"0 p2", "1 p1", "2 last p0"};
    std::vector<std::string> twice = once;
    twice.insert(twice.end(), once.begin(), once.end());
    EXPECT_EQ(calls, twice) << is_static;
  }
}

TEST(CommHooks, AHookMayKeepABucketWhoseReducerHasRebuiltItsBuckets) {
  std::optional<GradBucket> first;
  std::vector<std::string> labels;
  const auto params = named_zeros({2, 3, 4});
  Reducer reducer(params, replicas(ParallelState::single_process()), {.bucket_bytes_caps = {1}});
  reducer.register_comm_hook(std::make_shared<FunctionHook>("keep", [&](const GradBucket& bucket) {
    if (!first) first = bucket;
    labels.push_back(first->label());
    EXPECT_EQ(first->gradients().size(), 1U);
    return AllReduceHook().start(bucket);
  }));
  for (int step = 0; step < 2; ++step)
    reduce(reducer, [&] { return linear_loss(params, {0, 1, 2}, 1); });
  EXPECT_TRUE(reducer.has_rebuilt_buckets());
  EXPECT_EQ(labels, std::vector<std::string>(6, "bucket 0 ('p2' to 'p2')"));
}

TEST(CommHooks, AHookThatReturnsNothingOrAnotherSizeIsRefused) {
  const std::pair<CommHook::Finish, const char*> refused[] = {
      {[] { return at::zeros({1}); },
       "returned 1 elements for bucket 0 ('p0' to 'p0'), allowed: 2"},
      {[] { return at::Tensor(); }, "returned 0 elements for bucket 0 ('p0' to 'p0'), allowed: 2"},
      {nullptr, ""}};
  for (const auto& [finish, text] : refused)
    for (const bool compressed : {false, true}) {
      const auto params = named_zeros({2});
      Reducer reducer(params, replicas(ParallelState::single_process()));
      std::shared_ptr<CommHook> hook = std::make_shared<FunctionHook>(
          "short", [&result = finish](const GradBucket&) { return result; });
      if (compressed) hook = std::make_shared<CompressHook>(at::kBFloat16, hook);
      reducer.register_comm_hook(hook);
      const std::string expected =
          finish ? text : "hook '" + hook->name() + "': returned nothing to wait for";
      EXPECT_TRUE(throws_with<UsageError>(
          [&] { reduce(reducer, [&] { return linear_loss(params, {0}, 1); }); }, expected))
          << compressed;
    }
}

TEST(CommHooks, AResultForASparseBucketThatIsNoGradientOfItIsRefused) {
  const std::pair<at::Tensor, std::string> refused[] = {
      {at::Tensor(), "returned nothing for bucket "},
      {at::zeros({4, 2}), "returned a dense tensor [4, 2] of Float for bucket "},
      {at::zeros({5, 2}).to_sparse(1), "returned a sparse tensor [5, 2] of Float for bucket "},
      {at::zeros({4, 2}, at::kDouble).to_sparse(1),
       "a sparse tensor [4, 2] of Double for bucket "}};
  for (const auto& [result, text] : refused) {
    const std::vector<NamedParameter> params = named({at::ones({4, 2})});
    Reducer reducer(params, replicas(ParallelState::single_process()),
                    {.sparse_parameters = {params[0].name}});
    reducer.register_comm_hook(std::make_shared<FunctionHook>(
        "odd", [&given = result](const GradBucket&) { return [given] { return given; }; }));
    EXPECT_TRUE(throws_with<UsageError>(
        [&] {
          reduce(reducer, [&] {
            return at::embedding(params[0].tensor, at::zeros({1}, at::kLong), -1, false, true)
                .sum();
          });
        },
        text))
        << text;
  }
}

/// A matrix [12, 10] for each rank.
at::Tensor matrix_of(int64_t rank, int step = 0) {
  return at::sin(at::arange(120, at::kDouble) * 0.37 * static_cast<double>(rank + 1) + step * step)
      .view({12, 10});
}

at::Tensor mean_matrix(int64_t ranks, int step = 0) {
  at::Tensor sum = at::zeros({12, 10}, at::kDouble);
  for (int64_t rank = 0; rank < ranks; ++rank) sum += matrix_of(rank, step);
  return sum / ranks;
}

/// Gradients of a matrix and a vector over `steps` with PowerSGD.
std::vector<at::Tensor> power_sgd(const ParallelState& state, const PowerSgdOptions& options,
                                  int steps, const std::function<at::Tensor(int)>& gradient,
                                  std::shared_ptr<CommHook> hook = nullptr) {
  const auto params = named({at::zeros({12, 10}, at::kDouble), at::zeros({7}, at::kDouble)});
  Reducer reducer(params, replicas(state));
  reducer.register_comm_hook(hook ? hook : std::make_shared<PowerSgdHook>(options));
  std::vector<at::Tensor> gradients;
  for (int step = 0; step < steps; ++step) {
    reducer.zero_grad_buffer();
    reduce(reducer, [&] {
      return (params[0].tensor * gradient(step)).sum() +
             params[1].tensor.sum() * static_cast<double>(state.rank());
    });
    EXPECT_TRUE(at::allclose(params[1].tensor.grad(),
                             at::full({7}, (replicas(state).size() - 1) / 2., at::kDouble)));
    gradients.push_back(params[0].tensor.grad().clone());
  }
  return gradients;
}

TEST(PowerSgd, AMeanOfItsRankIsExact) {
  run_ranks(3, [](const ParallelState& state) {
    const auto low_rank = [&](int64_t rank) {  // all in the same two columns
      const at::Tensor left = at::cos(at::arange(24, at::kDouble)).view({12, 2});
      const at::Tensor right = at::sin(at::arange(20, at::kDouble) * (rank + 1.)).view({2, 10});
      return left.matmul(right);
    };
    const at::Tensor mean = (low_rank(0) + low_rank(1) + low_rank(2)) / 3;
    const auto found =
        power_sgd(state, {.rank = 2, .start_iteration = 0, .min_compression_rate = 1}, 1,
                  [&](int) { return low_rank(state.rank()); });
    EXPECT_TRUE(at::allclose(found[0], mean, 1e-10, 1e-11));
  });
}

TEST(PowerSgd, AWarmStartFindsTheBestApproximation) {
  run_ranks(2, [](const ParallelState& state) {
    const auto found =
        power_sgd(state, {.rank = 2, .start_iteration = 0, .use_error_feedback = false}, 200,
                  [&](int) { return matrix_of(state.rank()); });
    const auto [u, s, v] = at::linalg_svd(mean_matrix(2), false);
    const at::Tensor best = u.slice(1, 0, 2).mul(s.slice(0, 0, 2)).matmul(v.slice(0, 0, 2));
    EXPECT_TRUE(at::allclose(found.back(), best, 1e-6, 1e-7));
    EXPECT_FALSE(at::allclose(found.back(), mean_matrix(2), 1e-2, 1e-2));
  });
}

TEST(PowerSgd, ErrorFeedbackLosesNothing) {
  // The sum of what was sent equals the sum of the gradients, apart from what is still owed: the
  // mean of the errors, which stays bounded.
  run_ranks(2, [](const ParallelState& state) {
    const int steps = 60;
    const auto owed = [&](bool feedback) {
      const auto found =
          power_sgd(state, {.start_iteration = 3, .use_error_feedback = feedback}, steps,
                    [&](int step) { return matrix_of(state.rank(), step % 2); });
      at::Tensor difference = at::zeros({12, 10}, at::kDouble);
      for (int step = 0; step < steps; ++step) {
        difference += mean_matrix(2, step % 2) - found[static_cast<size_t>(step)];
        if (step < 3) {
          EXPECT_TRUE(at::allclose(difference, at::zeros_like(difference), 0, 1e-12));
        }
      }
      return difference.norm().item<double>() / mean_matrix(2).norm().item<double>();
    };
    const double with = owed(true), without = owed(false);
    EXPECT_LT(with, 8);
    EXPECT_GT(without, 3 * with);
  });
}

// As with a loss scale that is too large, where the optimizer skips the step.
TEST(PowerSgd, AnOverflowIsForgotten) {
  run_ranks(2, [](const ParallelState& state) {
    constexpr int kOverflow = 4;
    for (const bool warm : {true, false}) {
      const PowerSgdOptions options = {.start_iteration = 0, .warm_start = warm};
      const auto mine = [&](int step) { return matrix_of(state.rank(), step); };
      const auto undisturbed = power_sgd(state, options, 9, mine);
      const auto found = power_sgd(state, options, 10, [&](int step) {
        at::Tensor gradient = mine(step <= kOverflow ? step : step - 1).clone();
        if (step == kOverflow && state.rank() == 1) gradient[3][2] = INFINITY;
        return gradient;
      });
      EXPECT_FALSE(found[kOverflow].isfinite().all().item<bool>());
      for (size_t step = 0; step < undisturbed.size(); ++step) {
        const at::Tensor& gradient = found[step < kOverflow ? step : step + 1];
        EXPECT_TRUE(gradient.isfinite().all().item<bool>()) << step;
        // Without a warm start, the factors depend on the iteration number.
        if (warm || step < kOverflow) {
          EXPECT_TRUE(at::equal(gradient, undisturbed[step])) << step;
        }
      }
    }
  });
}

TEST(PowerSgd, FactorsTravelAndChainsWork) {
  CollectiveLog log;
  run_ranks(2,
            [&](const ParallelState& state) {
              const size_t before = log.of_rank(state.rank()).size();
              const auto chain = std::make_shared<CompressHook>(
                  at::kBFloat16,
                  std::make_shared<PowerSgdHook>(PowerSgdOptions{.start_iteration = 0, .seed = 5}));
              EXPECT_EQ(chain->name(), "bf16-compress(powerSGD(rank 1))");
              power_sgd(state, {.start_iteration = 0}, 1,
                        [&](int) { return matrix_of(state.rank()); });
              const auto calls = log.of_rank(state.rank());
              std::vector<int64_t> bytes;
              for (size_t i = before; i < calls.size(); ++i)
                if (calls[i].operation == "all_reduce (sum)") bytes.push_back(calls[i].bytes);
              EXPECT_EQ(bytes, (std::vector<int64_t>{7 * 8, 12 * 8, 10 * 8}));
              const auto found = power_sgd(
                  state, {}, 1,
                  [&](int) {
                    return at::ones({12, 10}, at::kDouble);
                  },
                  chain);
              EXPECT_TRUE(at::allclose(found[0], at::ones({12, 10}, at::kDouble), 3e-2));
            },
            {.log = &log});
  EXPECT_TRUE(throws_with<ConfigError>([] { PowerSgdHook({.rank = 0}); }, "found rank 0"));
}

}  // namespace
}  // namespace lockstep
