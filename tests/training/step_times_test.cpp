// How the time of an iteration is spent, and which rank is slowest in which part, on all layouts.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string_view>
#include <thread>

#include <ATen/record_function.h>

#include "lockstep/tests/training/telemetry_runs.h"

namespace lockstep {
namespace {

using testing::CollectiveLog;
using testing::Settings;
using testing::telemetry_layouts;
using testing::TelemetryRuns;

TEST(StepTimes, PartsAddUpToTheIterationOnEveryLayout) {
  const TelemetryRuns runs;
  for (const auto& [name, world, settings] : telemetry_layouts()) {
    SCOPED_TRACE(name);
    for (const auto& iterations : runs.run(runs.config(settings), world))
      for (const IterationMetrics& metrics : iterations) {
        ASSERT_TRUE(metrics.times);
        for (const double ms : metrics.times->ms) EXPECT_GE(ms, 0);
        EXPECT_DOUBLE_EQ(metrics.times->total(), metrics.iteration_ms);
        for (const StepPart part :
             {StepPart::forward, StepPart::backward, StepPart::optimizer, StepPart::data})
          EXPECT_GT((*metrics.times)[part], 0) << name_of(part);
        EXPECT_EQ((*metrics.times)[StepPart::communication] > 0, world > 1);
        EXPECT_DOUBLE_EQ(metrics.tokens_per_second,
                         16 * 8e3 * (world == 3 ? 1.5 : 1) / metrics.iteration_ms);
      }
  }
}

/// Mean times of one rank over iterations 2 and 3.
StepTimes mean_times(const std::vector<IterationMetrics>& iterations) {
  StepTimes mean;
  for (size_t i = 0; i < kStepParts; ++i)
    mean.ms[i] = iterations.at(1).times->ms[i] / 2 + iterations.at(2).times->ms[i] / 2;
  return mean;
}

TEST(StepTimes, RanksAreComparedByTheTimesThatTheyTellOnEveryLayout) {
  const TelemetryRuns runs;
  for (const auto& [name, world, settings] : telemetry_layouts()) {
    SCOPED_TRACE(name);
    const auto told = runs.run(runs.config(settings, {"train.log_interval=2"}), world);
    std::vector<StepTimes> means;
    for (const auto& iterations : told) means.push_back(mean_times(iterations));
    const SlowestRank expected = slowest_rank(means);
    for (const auto& iterations : told) {
      for (const size_t i : {0, 2}) EXPECT_FALSE(iterations.at(i).slowest_rank);
      ASSERT_EQ(iterations.at(3).slowest_rank.has_value(), world > 1);
      if (world == 1) continue;
      const SlowestRank& found = *iterations.at(3).slowest_rank;
      EXPECT_EQ(found.rank, expected.rank);
      EXPECT_EQ(found.part, expected.part);
      EXPECT_NEAR(found.ms, expected.ms, 1e-9 * expected.ms);
      EXPECT_NEAR(found.behind_ms, expected.behind_ms, 1e-9 * expected.ms);
      EXPECT_EQ(found.first_iteration, 2);
      EXPECT_EQ(found.last_iteration, 3);
    }
  }
}

/// Sleeps longer than a busy machine keeps a rank waiting.
void lag() { std::this_thread::sleep_for(std::chrono::milliseconds(400)); }

/// From now on this thread sleeps in the operator that embeds tokens, which runs only in forward.
void lag_in_forward() {
  at::addThreadLocalCallback(
      at::RecordFunctionCallback([](const at::RecordFunction& function)
                                     -> std::unique_ptr<at::ObserverContext> {
        if (std::string_view(function.name()) == "aten::embedding") lag();
        return nullptr;
      }).scopes({at::RecordScope::FUNCTION}));
}

TEST(StepTimes, ARankThatLagsIsNamedWithWhatItLagsIn) {
  const TelemetryRuns runs;
  const Config config = runs.config({}, {"train.log_interval=2", "train.micro_batch_size=4"});
  for (const StepPart part : {StepPart::forward, StepPart::backward}) {
    const auto told = runs.run(config, 2, nullptr, [&](Trainer& trainer, const auto& state) {
      if (state.rank() == 0) return;
      if (part == StepPart::forward) return lag_in_forward();
      trainer.model().parameters().front().register_hook([](const at::Tensor&) { lag(); });
    });
    const SlowestRank& found = *told.front().at(3).slowest_rank;
    EXPECT_EQ(found.rank, 1);
    EXPECT_EQ(found.part, part);
    EXPECT_GE(found.times[part], 400);
    EXPECT_GE(found.ms, 400);
    const StepTimes waiting = mean_times(told.front());
    EXPECT_GT(waiting[StepPart::communication], found.behind_ms / 2);
  }
}

/// (operation, label, group, bytes) of each call of a rank.
std::vector<std::string> calls_of(const CollectiveLog& log, int64_t rank) {
  std::vector<std::string> calls;
  for (const CollectiveRecord& record : log.of_rank(rank))
    calls.push_back(fmt::format("{} {} {} {}", record.operation, record.label, record.group,
                                record.label == "loss" ? 0 : record.bytes));
  return calls;
}

std::vector<int64_t> bytes_of_losses(const CollectiveLog& log) {
  std::vector<int64_t> bytes;
  for (const CollectiveRecord& record : log.of_rank(0))
    if (record.label == "loss") bytes.push_back(record.bytes);
  return bytes;
}

TEST(StepTimes, RanksAreComparedByWhatIsSentAnyway) {
  const TelemetryRuns runs;
  CollectiveLog with, without;
  const Settings few = {"train.log_interval=2", "train.train_iters=5", "train.global_batch_size=6"};
  const auto measured = runs.run(runs.config(few), 3, &with);
  const auto plain = runs.run(runs.config(few, {"train.log_step_times=false"}), 3, &without);
  for (int64_t rank = 0; rank < 3; ++rank) EXPECT_EQ(calls_of(with, rank), calls_of(without, rank));
  const int64_t times = 3 * 6 * 8;  // 6 parts of each rank
  EXPECT_EQ(bytes_of_losses(with), (std::vector<int64_t>{24, 24 + times, 24, 24 + times, 24}));
  EXPECT_EQ(bytes_of_losses(without), std::vector<int64_t>(5, 24));
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(measured[0][i].slowest_rank.has_value(), i == 1 || i == 3);
    EXPECT_EQ(measured[0][i].lm_loss, plain[0][i].lm_loss);
    EXPECT_EQ(measured[0][i].grad_norm, plain[0][i].grad_norm);
    EXPECT_FALSE(plain[0][i].times);
    EXPECT_FALSE(plain[0][i].slowest_rank);
    EXPECT_GT(plain[0][i].iteration_ms, 0);
  }
  EXPECT_EQ(measured[0][3].slowest_rank->first_iteration, 2);
  EXPECT_EQ(measured[0][3].slowest_rank->last_iteration, 3);
}

TEST(StepTimes, FlopsFollowFromTokensTimeAndRanks) {
  const TelemetryRuns runs;
  // 4 layers: linear_qkv 16 x 48, linear_proj 16 x 16, SwiGLU's three matrices 16 x 32, attention
  // 2 x 16 wide over half of 16 tokens; the output layer 16 x 256.
  const double of_token = 6 * (4 * (16 * 48 + 16 * 16 + 3 * 16 * 32 + 2 * 16 * 8) + 16 * 256);
  const auto told =
      runs.run(runs.config({}, {"train.peak_tflops_per_device=0.5"}), 2).front().front();
  const double expected = of_token * 8 * 16 / 2 / (told.iteration_ms / 1e3) / 1e12;
  EXPECT_DOUBLE_EQ(told.model_tflops_per_device.value(), expected);
  EXPECT_DOUBLE_EQ(told.utilisation.value(), expected / 0.5);
  EXPECT_FALSE(runs.run(runs.config({}), 1).front().front().utilisation);
}

}  // namespace
}  // namespace lockstep
