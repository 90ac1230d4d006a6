#include "lockstep/pipeline/schedule.h"

#include <gtest/gtest.h>

#include <sstream>

#include "lockstep/core/error.h"
#include "lockstep/pipeline/schedule_check.h"
#include "lockstep/pipeline/simulation.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::throws_with;
using Table = std::vector<std::pair<int64_t, int64_t>>;
using Counts = std::vector<int64_t>;

constexpr ScheduleFamily kGpipe = ScheduleFamily::gpipe, kZeroBubble = ScheduleFamily::zb_h1;

std::string order(const ScheduleOptions& options, size_t rank) {
  std::string text;
  const PipelineSchedule schedule = make_schedule(options);
  for (const PipelineTask& task : schedule.ranks.at(rank))
    text += (text.empty() ? "" : " ") + to_string(task);
  return text;
}

Counts steady(const ScheduleOptions& options) {
  Counts counts;
  for (const int64_t warmup : make_schedule(options).warmup)
    counts.push_back(options.microbatches * options.virtual_pipeline - warmup);
  return counts;
}

TEST(Schedule, G83AndG84TableOfMegatronCore) {
  EXPECT_EQ(
      schedule_table(5, 2, 3),
      (Table{{0, 0}, {1, 0}, {2, 0}, {0, 1}, {1, 1}, {2, 1}, {3, 0}, {4, 0}, {3, 1}, {4, 1}}));
  EXPECT_EQ(schedule_table(4, 2, 2),
            (Table{{0, 0}, {1, 0}, {0, 1}, {1, 1}, {2, 0}, {3, 0}, {2, 1}, {3, 1}}));
  EXPECT_EQ(schedule_table(4, 3, 2), (Table{{0, 0},
                                            {1, 0},
                                            {0, 1},
                                            {1, 1},
                                            {0, 2},
                                            {1, 2},
                                            {2, 0},
                                            {3, 0},
                                            {2, 1},
                                            {3, 1},
                                            {2, 2},
                                            {3, 2}}));
  EXPECT_THROW(schedule_table(4, 0, 2), UsageError);
}

TEST(Schedule, G85WarmupOfOneFOneB) {
  EXPECT_EQ(make_schedule({.pipeline = 4, .microbatches = 8}).warmup, (Counts{3, 2, 1, 0}));
  EXPECT_EQ(make_schedule({.pipeline = 4, .microbatches = 2}).warmup, (Counts{2, 2, 1, 0}));
  EXPECT_EQ(make_schedule({.pipeline = 2, .microbatches = 1}).warmup, (Counts{1, 0}));
}

TEST(Schedule, G86WarmupOfInterleaved) {
  ScheduleOptions options{.pipeline = 2, .virtual_pipeline = 2, .microbatches = 4};
  EXPECT_EQ(make_schedule(options).warmup, (Counts{4, 2}));
  EXPECT_EQ(steady(options), (Counts{4, 6}));
  options = {.pipeline = 4, .virtual_pipeline = 2, .microbatches = 8};
  EXPECT_EQ(make_schedule(options).warmup, (Counts{10, 8, 6, 4}));
  EXPECT_EQ(steady(options), (Counts{6, 8, 10, 12}));
  options.microbatches = 4;
  EXPECT_EQ(make_schedule(options).warmup, (Counts{8, 8, 6, 4}));
  EXPECT_EQ(steady(options), (Counts{0, 0, 2, 4}));
  EXPECT_EQ(num_warmup_microbatches(options, 2), 6);
  EXPECT_THROW(num_warmup_microbatches(options, 4), UsageError);
}

TEST(Schedule, G87OrderOfOneFOneB) {
  const ScheduleOptions options{.pipeline = 2, .microbatches = 4};
  EXPECT_EQ(order(options, 0), "F0.0 F1.0 B0.0 F2.0 B1.0 F3.0 B2.0 B3.0");
  EXPECT_EQ(order(options, 1), "F0.0 B0.0 F1.0 B1.0 F2.0 B2.0 F3.0 B3.0");
}

TEST(Schedule, G88OrderOfInterleaved) {
  EXPECT_EQ(order({.pipeline = 2, .virtual_pipeline = 2, .microbatches = 4}, 0),
            "F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 B2.1 B3.1 B2.0 B3.0");
}

TEST(Schedule, OrderOfTheOthers) {
  EXPECT_EQ(order({.microbatches = 2}, 0), "F0.0 B0.0 F1.0 B1.0");
  EXPECT_EQ(order({.pipeline = 2, .microbatches = 3, .family = kGpipe}, 1),
            "F0.0 F1.0 F2.0 B0.0 B1.0 B2.0");
  const ScheduleOptions zero_bubble{.pipeline = 3, .microbatches = 4, .family = kZeroBubble};
  EXPECT_EQ(order(zero_bubble, 0), "F0.0 F1.0 F2.0 B0.0 W0.0 F3.0 B1.0 W1.0 B2.0 W2.0 B3.0 W3.0");
  EXPECT_EQ(order(zero_bubble, 2), "F0.0 B0.0 F1.0 B1.0 F2.0 B2.0 W0.0 F3.0 B3.0 W1.0 W2.0 W3.0");
  EXPECT_EQ(
      order({.pipeline = 2, .virtual_pipeline = 2, .microbatches = 2, .forward_only = true}, 1),
      "F0.0 F1.0 F0.1 F1.1");
  EXPECT_EQ(make_schedule({.pipeline = 2, .microbatches = 3, .family = kGpipe}).warmup,
            (Counts{3, 3}));
}

TEST(Schedule, ProducersAndConsumers) {
  const PipelineSchedule schedule =
      make_schedule({.pipeline = 3, .virtual_pipeline = 2, .microbatches = 3});
  const auto f = [](int64_t m, int64_t c) { return PipelineTask{TaskKind::forward, m, c}; };
  const auto b = [](int64_t m, int64_t c) { return PipelineTask{TaskKind::backward, m, c}; };
  EXPECT_EQ(schedule.producer_of(0, f(1, 0)), std::nullopt);
  EXPECT_EQ(schedule.producer_of(2, f(1, 0)), (PlacedTask{1, f(1, 0)}));
  EXPECT_EQ(schedule.producer_of(0, f(1, 1)), (PlacedTask{2, f(1, 0)}));
  EXPECT_EQ(schedule.consumer_of(2, f(1, 0)), (PlacedTask{0, f(1, 1)}));
  EXPECT_EQ(schedule.consumer_of(2, f(1, 1)), std::nullopt);
  EXPECT_EQ(schedule.producer_of(2, b(1, 1)), (PlacedTask{2, f(1, 1)}));
  EXPECT_EQ(schedule.producer_of(2, b(1, 0)), (PlacedTask{0, b(1, 1)}));
  EXPECT_EQ(schedule.consumer_of(0, b(1, 1)), (PlacedTask{2, b(1, 0)}));
  EXPECT_EQ(schedule.consumer_of(1, b(1, 0)), (PlacedTask{0, b(1, 0)}));
  EXPECT_EQ(schedule.consumer_of(0, b(1, 0)), std::nullopt);
  EXPECT_EQ(schedule.consumer_of(1, {TaskKind::weight, 1, 0}), std::nullopt);
}

TEST(Schedule, OptionsThatDoNotFitAreRefusedByName) {
  const auto refused = [](const ScheduleOptions& options, const std::string& part) {
    return throws_with<ConfigError>([&] { make_schedule(options); }, part);
  };
  EXPECT_TRUE(refused({.pipeline = 0}, "pipeline: found 0, allowed: >= 1"));
  EXPECT_TRUE(refused({.virtual_pipeline = 0}, "virtual: found 0, allowed: >= 1"));
  EXPECT_TRUE(refused({.microbatches = -1}, "microbatches: found -1, allowed: >= 1"));
  EXPECT_TRUE(refused({.microbatch_group_size = 0}, "microbatch-group-size: found 0"));
  EXPECT_TRUE(refused({.virtual_pipeline = 2, .microbatches = 4},
                      "virtual: found 2, allowed with pipeline (1): 1"));
  EXPECT_TRUE(
      refused({.pipeline = 4, .virtual_pipeline = 2, .microbatches = 3},
              "microbatches: found 3, allowed with virtual (2) > 1: at least pipeline (4)"));
  ScheduleOptions options{.pipeline = 3, .virtual_pipeline = 2, .microbatches = 8};
  EXPECT_TRUE(refused(options, "which leaves 2 of microbatches (8) for the last group"));
  options.microbatch_group_size = 2;
  EXPECT_TRUE(refused(options,
                      "microbatch-group-size: found 2, allowed with virtual (2) > 1: "
                      "pipeline (3) to microbatches (8)"));
  options.microbatch_group_size = 9;
  EXPECT_TRUE(refused(options, "microbatch-group-size: found 9"));
  options.microbatch_group_size = 5;
  EXPECT_EQ(make_schedule(options).ranks.size(), 3u);
  options.family = kZeroBubble;
  EXPECT_TRUE(refused(options, "virtual: found 2, allowed with schedule zb-h1: 1"));
  EXPECT_TRUE(refused({.pipeline = 2, .virtual_pipeline = 2, .microbatches = 2, .family = kGpipe},
                      "virtual: found 2, allowed with schedule gpipe: 1"));
  EXPECT_TRUE(
      refused({.pipeline = 1 << 10, .microbatches = int64_t{1} << 60}, "more than 4194304"));
}

TEST(Schedule, PeakOfLiveMicrobatches) {
  const auto peaks = [](const ScheduleOptions& options) {
    return peak_live_microbatches(make_schedule(options));
  };
  EXPECT_EQ(peaks({.pipeline = 4, .microbatches = 64}), (Counts{4, 3, 2, 1}));
  EXPECT_EQ(peaks({.pipeline = 4, .microbatches = 2}), (Counts{2, 2, 2, 1}));
  EXPECT_EQ(peaks({.pipeline = 3, .microbatches = 64, .family = kGpipe}), (Counts{64, 64, 64}));
  EXPECT_EQ(peaks({.pipeline = 4, .microbatches = 64, .family = kZeroBubble}),
            (Counts{4, 4, 4, 4}));
  EXPECT_EQ(peaks({.pipeline = 4, .virtual_pipeline = 2, .microbatches = 64}),
            (Counts{11, 9, 7, 5}));
  EXPECT_EQ(peaks({.pipeline = 4, .microbatches = 64, .forward_only = true}), (Counts{1, 1, 1, 1}));
}

}  // namespace
}  // namespace lockstep
