// Mistakes of stages, and the state that a run leaves behind.

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <stdexcept>
#include <thread>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/pipeline/executor.h"
#include "lockstep/tests/pipeline/toy_stages.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::errors_of_ranks;
using testing::kWidth;

const testing::RankThreadOptions kTwoStages = {.sizes = {.pipeline = 2}};

TEST(PipelineMisuse, AnOutputOfAnotherShapeThanDeclaredIsRefusedBeforeItIsSent) {
  const auto error_of = [](const at::Tensor& output) {
    const auto errors = errors_of_ranks(
        2,
        [&](const ParallelState& state) {
          const PipelineExecutor executor(state, make_schedule({.pipeline = 2, .microbatches = 2}),
                                          {.activation_shape = [](int64_t) {
                                            return TensorShape{{3, kWidth}, at::kDouble};
                                          }});
          executor.run({[&](int64_t, const at::Tensor& input) {
            return state.rank() == 0 ? output : (input * 2).sum();
          }});
        },
        kTwoStages);
    EXPECT_NE(errors[1].find("rank 0: pipeline stage of chunk 0 of rank 0"), std::string::npos)
        << errors[1];
    return errors[0];
  };
  const std::string allowed = "allowed: 3 x 6 of Double, as declared for micro-batch 0";
  for (const auto& [output, found] : std::vector<std::pair<at::Tensor, std::string>>{
           {at::ones({2, kWidth}, at::kDouble), "found 2 x 6 of Double"},
           {at::ones({kWidth, 3}, at::kDouble), "found 6 x 3 of Double"},
           {at::ones({3, kWidth}, at::kFloat), "found 3 x 6 of Float"}}) {
    const std::string error = error_of(output);
    EXPECT_NE(error.find(found), std::string::npos) << error;
    EXPECT_NE(error.find(allowed), std::string::npos) << error;
  }
}

TEST(PipelineMisuse, AnOutputOfTooManyDimensionsIsRefusedBeforeItIsSent) {
  const auto errors = errors_of_ranks(
      2,
      [&](const ParallelState& state) {
        const PipelineExecutor executor(state, make_schedule({.pipeline = 2, .microbatches = 2}));
        executor.run({[&](int64_t, const at::Tensor& input) {
          return state.rank() == 0 ? at::ones({1, 1, 1, 1, 1, 1, 3}, at::kDouble) : input.sum();
        }});
      },
      kTwoStages);
  for (const std::string& error : errors)
    EXPECT_NE(error.find("found 7 dimensions, allowed: at most 6"), std::string::npos) << error;
}

TEST(PipelineMisuse, WhateverAStageThrowsEndsAllRanksSoon) {
  const auto begin = std::chrono::steady_clock::now();
  const auto errors = errors_of_ranks(
      2,
      [&](const ParallelState& state) {
        const PipelineExecutor executor(state, make_schedule({.pipeline = 2, .microbatches = 2}));
        const at::Tensor weight = at::ones({kWidth}, at::kDouble).requires_grad_(true);
        try {
          executor.run({[&](int64_t, const at::Tensor&) {
            if (state.rank() == 1) throw 42;
            return weight * 2;
          }});
        } catch (const int number) {
          throw std::runtime_error("threw " + std::to_string(number));
        }
      },
      kTwoStages);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(15));
  EXPECT_EQ(errors[1], "threw 42");
  EXPECT_NE(errors[0].find("rank 1: a stage threw"), std::string::npos) << errors[0];
}

TEST(PipelineMisuse, AStageThatThrowsEndsARankThatWaitsForItsReceiver) {
  const auto begin = std::chrono::steady_clock::now();
  int64_t started = 0;
  const auto errors = errors_of_ranks(
      2,
      [&](const ParallelState& state) {
        const PipelineExecutor executor(
            state, make_schedule({.pipeline = 2, .microbatches = 24, .forward_only = true}));
        executor.run({[&](int64_t m, const at::Tensor& input) {
          if (state.rank() == 0) {
            ++started;
            return at::ones({3, kWidth}, at::kDouble);
          }
          if (m == 1) {
            std::this_thread::sleep_for(std::chrono::milliseconds(200));
            throw std::runtime_error("the stage broke");
          }
          return input.sum();
        }});
      },
      kTwoStages);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(15));
  EXPECT_EQ(errors[1], "the stage broke");
  EXPECT_NE(errors[0].find("rank 1: the stage broke"), std::string::npos) << errors[0];
  // One has been used, one is in use, one has been received, and two wait.
  EXPECT_LE(started, 5);
}

/// Runs a pipeline of one stage that returns `loss`, twice as two micro-batches.
void run_alone(ScheduleFamily family, const std::function<at::Tensor()>& loss) {
  const PipelineExecutor executor(ParallelState::single_process(),
                                  make_schedule({.microbatches = 2, .family = family}));
  for (int run = 0; run < 2; ++run)
    executor.run({[&](int64_t, const at::Tensor&) { return loss(); }});
}

TEST(PipelineMisuse, ALossThatLostItsGradientIsRefusedOnOneStageToo) {
  const at::Tensor weight = at::ones({kWidth}, at::kDouble).requires_grad_(true);
  const std::vector<std::function<at::Tensor()>> losses = {
      [&] { return (weight * 2).sum().detach(); }, [&] { return (weight * 2).sum().to(at::kLong); },
      [&] {
        const at::NoGradGuard no_grad;
        return at::stack({weight, weight}).sum();
      }};
  for (const auto family : {ScheduleFamily::one_f_one_b, ScheduleFamily::zb_h1}) {
    for (const auto& loss : losses)
      EXPECT_TRUE(testing::throws_with<UsageError>(
          [&] { run_alone(family, loss); },
          "chunk 0 of rank 0: found a loss that requires no gradient although parameters do"));
    EXPECT_FALSE(weight.grad().defined());
    run_alone(family, [&] { return (weight * 2).sum(); });
    EXPECT_TRUE(at::equal(weight.grad(), at::full({kWidth}, 8.0, at::kDouble)));
    at::Tensor(weight).mutable_grad() = at::Tensor();
  }
}

TEST(PipelineMisuse, AStageWhoseParametersAreAllFrozenRuns) {
  const at::Tensor frozen = at::ones({kWidth}, at::kDouble);
  for (const auto family : {ScheduleFamily::one_f_one_b, ScheduleFamily::zb_h1})
    EXPECT_NO_THROW(run_alone(family, [&] { return (frozen * 2).sum(); }));
}

TEST(PipelineMisuse, BackwardsOutsideOfARunDeferNothing) {
  const auto deferred = std::make_shared<DeferredGradients>();
  const PipelineExecutor executor(
      ParallelState::single_process(),
      make_schedule({.microbatches = 2, .family = ScheduleFamily::zb_h1}), {.deferred = deferred});
  int put_off = 0, run = 0;
  bool breaks = false;
  const PipelineStage stage = [&](int64_t, const at::Tensor&) {
    const at::Tensor hidden = at::ones({}).requires_grad_(true) * 2;
    hidden.register_hook([&](const at::Tensor& grad) {
      if (deferred->deferring()) deferred->add([&] { ++run; });
      put_off += deferred->deferring() ? 1 : 0;
      if (breaks) throw std::runtime_error("the backward broke");
      return grad;
    });
    return hidden;
  };
  executor.run({stage});
  EXPECT_EQ(std::pair(put_off, run), std::pair(2, 2));
  stage(0, {}).backward();
  EXPECT_EQ(put_off, 2);
  breaks = true;
  EXPECT_THROW(executor.run({stage}), std::runtime_error);
  EXPECT_FALSE(deferred->deferring());
  EXPECT_TRUE(deferred->take().empty());
}

}  // namespace
}  // namespace lockstep
