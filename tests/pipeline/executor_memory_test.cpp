#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include <ATen/ATen.h>

#include "lockstep/pipeline/executor.h"
#include "lockstep/tests/support/memory_counter.h"
#include "lockstep/tests/support/rank_threads.h"

// Peak memory of the activations of a pipeline's ranks.

namespace lockstep {
namespace {

constexpr int64_t kRows = 4096, kColumns = 8;
constexpr int64_t kActivation = kRows * kColumns * 8;  // bytes that stages pass on

/// Peak of each rank over a run, in activations. A stage is x -> tanh(tanh(x)). It keeps the
/// results of its two operations for backward (the second one is also its output): 2 activations
/// per micro-batch between forward and backward. The last stage returns a sum instead.
std::vector<double> peaks(const ScheduleOptions& options) {
  std::vector<double> result(static_cast<size_t>(options.pipeline));
  testing::RankThreadOptions threads;
  threads.sizes.pipeline = options.pipeline;
  testing::run_ranks(
      options.pipeline,
      [&](const ParallelState& state) {
        const PipelineExecutor executor(state, make_schedule(options), {[](int64_t) {
                                          return TensorShape{{kRows, kColumns}, at::kDouble};
                                        }});
        const at::Tensor scale = at::ones({}, at::kDouble).requires_grad_(true);
        const testing::MemoryCounter memory;
        executor.run({[&](int64_t, const at::Tensor& input) {
          const at::Tensor x =
              input.defined() ? input : scale.expand({kRows, kColumns});  // takes no memory
          const at::Tensor y = at::tanh(at::tanh(x));
          return state.rank() + 1 == options.pipeline ? y.sum() : y;
        }});
        result[static_cast<size_t>(state.rank())] =
            static_cast<double>(memory.peak()) / static_cast<double>(kActivation);
      },
      threads);
  return result;
}

// Rank r of P has min(P - r, M) micro-batches in flight, with 2 activations each. In addition it
// holds at most two waiting inputs and two waiting gradients, one that is in use, an output and a
// gradient that are being sent, and the two results of an operation. Ranks that other programs
// delay rarely hold one or two more, so the least of six runs counts.
TEST(PipelineMemory, OfOneFOneBIsBoundedByTheStagesNotTheMicroBatches) {
  constexpr int64_t kPipeline = 4;
  constexpr double kWorking = 9;
  for (const int64_t microbatches : {8, 24}) {
    const ScheduleOptions options = {.pipeline = kPipeline, .microbatches = microbatches};
    std::vector<double> found = peaks(options);
    for (int again = 0; again < 5; ++again)
      std::ranges::transform(found, peaks(options), found.begin(),
                             [](double a, double b) { return std::min(a, b); });
    for (int64_t rank = 0; rank < kPipeline; ++rank) {
      const auto in_flight = static_cast<double>(kPipeline - rank);
      EXPECT_GE(found[static_cast<size_t>(rank)], 2 * in_flight) << rank;
      EXPECT_LE(found[static_cast<size_t>(rank)], 2 * in_flight + kWorking) << rank;
    }
  }
}

TEST(PipelineMemory, OfGpipeGrowsWithTheMicroBatches) {
  constexpr int64_t kPipeline = 2, kMicrobatches = 24;
  const auto found = peaks(
      {.pipeline = kPipeline, .microbatches = kMicrobatches, .family = ScheduleFamily::gpipe});
  for (const double peak : found) EXPECT_GE(peak, 2.0 * kMicrobatches);
}

/// Peak of the first of three stages, in activations. The last one is slow, and no stage but the
/// executor keeps outputs.
double peak_before_a_slow_stage(const ScheduleOptions& options, bool declares) {
  double result = 0;
  testing::RankThreadOptions threads;
  threads.sizes.pipeline = options.pipeline;
  PipelineExecutorOptions chosen;
  if (declares)
    chosen.activation_shape = [](int64_t) { return TensorShape{{kRows, kColumns}, at::kDouble}; };
  testing::run_ranks(
      options.pipeline,
      [&](const ParallelState& state) {
        const PipelineExecutor executor(state, make_schedule(options), chosen);
        const at::Tensor scale = at::ones({}, at::kDouble).requires_grad_(true);
        const testing::MemoryCounter memory;
        executor.run({[&](int64_t, const at::Tensor& input) {
          if (state.rank() == 0) return scale.expand({kRows, kColumns}) + 1;
          if (state.rank() == 1) return input + 1;
          std::this_thread::sleep_for(std::chrono::milliseconds(2));
          return input.sum();
        }});
        if (state.rank() == 0)
          result = static_cast<double>(memory.peak()) / static_cast<double>(kActivation);
      },
      threads);
  return result;
}

TEST(PipelineMemory, ARankThatIsAheadHoldsTwoOutputs) {
  constexpr double kWorking = 1;
  for (const bool declares : {true, false}) {
    const double found = peak_before_a_slow_stage(
        {.pipeline = 3, .microbatches = 24, .forward_only = true}, declares);
    EXPECT_GE(found, 2) << declares;
    EXPECT_LE(found, 2 + kWorking) << declares;
    // Two gradients that are being received, and two results of a backward.
    EXPECT_LE(peak_before_a_slow_stage(
                  {.pipeline = 3, .microbatches = 24, .family = ScheduleFamily::gpipe}, declares),
              6 + kWorking)
        << declares;
  }
}

}  // namespace
}  // namespace lockstep
