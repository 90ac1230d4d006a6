#include "lockstep/pipeline/simulation.h"

#include <gtest/gtest.h>

#include <sstream>

#include "lockstep/core/error.h"
#include "lockstep/pipeline/timeline_svg.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::throws_with;

using Spans = std::vector<std::pair<int64_t, int64_t>>;

Spans spans(const Timeline& timeline, size_t rank) {
  Spans result;
  for (const TaskTime& time : timeline.ranks.at(rank)) result.emplace_back(time.start, time.end);
  return result;
}

TEST(Simulation, TimesOfTwoRanks) {
  const PipelineSchedule schedule = make_schedule({.pipeline = 2, .microbatches = 2});
  const Timeline timeline = simulate(schedule, reference_cost(schedule));
  EXPECT_EQ(spans(timeline, 0), (Spans{{0, 1}, {1, 2}, {4, 6}, {7, 9}})) << "F0 F1 B0 B1";
  EXPECT_EQ(spans(timeline, 1), (Spans{{1, 2}, {2, 4}, {4, 5}, {5, 7}})) << "F0 B0 F1 B1";
  EXPECT_EQ(timeline.makespan(), 9);
  EXPECT_EQ(timeline.busy(1), 6);
  EXPECT_DOUBLE_EQ(timeline.bubble_fraction(), 1.0 / 3);
}

TEST(Simulation, TransfersTakeTheirTimeBetweenRanksAlone) {
  const PipelineSchedule schedule = make_schedule({.pipeline = 2, .microbatches = 2});
  const Timeline timeline = simulate(schedule, reference_cost(schedule), 10);
  EXPECT_EQ(spans(timeline, 1), (Spans{{11, 12}, {12, 14}, {14, 15}, {15, 17}}));
  EXPECT_EQ(spans(timeline, 0), (Spans{{0, 1}, {1, 2}, {24, 26}, {27, 29}}));
}

TEST(Simulation, UnevenStagesAndTasks) {
  const PipelineSchedule schedule = make_schedule({.pipeline = 3, .microbatches = 6});
  const Timeline timeline = simulate(schedule, [](int64_t rank, const PipelineTask& task) {
    return (rank == 1 ? 10 : 1) * (task.kind == TaskKind::backward ? 2 : 1);
  });
  EXPECT_EQ(timeline.busy(1), 180);
  EXPECT_EQ(timeline.makespan(), 1 + 180 + 2) << "the slow stage never waits once it has begun";
}

TEST(Simulation, BlockingTransfersCanWait) {
  const PipelineSchedule schedule = make_schedule({.pipeline = 2, .microbatches = 2});
  const StepLists steps = communication_steps(schedule);
  EXPECT_EQ(simulate_rendezvous(schedule, steps, reference_cost(schedule)).makespan(), 9);
  const auto slow_last = [](int64_t rank, const PipelineTask&) { return rank == 1 ? 10 : 1; };
  EXPECT_EQ(simulate(schedule, slow_last).ranks[0][1].start, 1);
  const Timeline blocking = simulate_rendezvous(schedule, steps, slow_last);
  EXPECT_EQ(blocking.ranks[0][1].start, 1);
  EXPECT_EQ(blocking.ranks[0][2].start, 21);
}

TEST(Simulation, CostsBelowOneAreRefused) {
  const PipelineSchedule schedule = make_schedule({.pipeline = 2, .microbatches = 2});
  const auto none = [](int64_t, const PipelineTask& task) { return task.microbatch == 1 ? 0 : 1; };
  EXPECT_TRUE(throws_with<UsageError>([&] { simulate(schedule, none); },
                                      "cost of task F1.0 on rank 0: found 0, allowed: >= 1"));
  EXPECT_TRUE(throws_with<UsageError>([&] { simulate(schedule, reference_cost(schedule), -1); },
                                      "found -1"));
}

size_t count(const std::string& text, const std::string& part) {
  size_t found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

TEST(TimelineSvg, ABoxForEachTask) {
  const PipelineSchedule schedule =
      make_schedule({.pipeline = 3, .microbatches = 4, .family = ScheduleFamily::zb_h1});
  const Timeline timeline = simulate(schedule, reference_cost(schedule));
  std::ostringstream out;
  write_timeline_svg(out, "a < b", schedule, timeline);
  const std::string svg = out.str();
  EXPECT_EQ(svg.rfind("<svg xmlns=\"http://www.w3.org/2000/svg\"", 0), 0u);
  EXPECT_EQ(count(svg, "<title>"), 3u * 4 * 3);
  EXPECT_EQ(count(svg, "<title>W3.0: "), 3u);
  EXPECT_EQ(count(svg, "<title>F0.0: 2 to 3</title>"), 1u);
  EXPECT_EQ(count(svg, "<text "), 1u + 3 + 3 + 3 * 4 * 3);
  EXPECT_EQ(count(svg, "a &lt; b"), 1u);
  EXPECT_EQ(svg.substr(svg.size() - 7), "</svg>\n");
  EXPECT_THROW(write_timeline_svg(out, "", schedule, Timeline{}), UsageError);
}

}  // namespace
}  // namespace lockstep
