// Wrong schedules and wrong orders of transfers must be refused by name.

#include "lockstep/pipeline/schedule_check.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "lockstep/core/error.h"
#include "lockstep/pipeline/simulation.h"
#include "lockstep/pipeline/timeline_svg.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::throws_with;
using Kind = PipelineStep::Kind;

PipelineSchedule small() { return make_schedule({.pipeline = 2, .microbatches = 4}); }

::testing::AssertionResult refused(const PipelineSchedule& schedule, const std::string& part) {
  return throws_with<UsageError>([&] { check_schedule(schedule); }, part);
}

TEST(ScheduleCheck, GoodOnesPass) {
  check_schedule(small());
  check_schedule(
      make_schedule({.pipeline = 3, .microbatches = 5, .family = ScheduleFamily::zb_h1}));
  check_schedule(make_schedule({.pipeline = 3, .microbatches = 5, .forward_only = true}));
}

TEST(ScheduleCheck, WrongListsOfTasks) {
  PipelineSchedule wrong = small();
  wrong.ranks[1].erase(wrong.ranks[1].begin() + 4);
  EXPECT_TRUE(refused(wrong, "rank 1: task F2.0 is missing"));
  wrong = small();
  wrong.ranks[0].pop_back();
  EXPECT_TRUE(refused(wrong, "rank 0: task B3.0 is missing"));
  wrong = small();
  wrong.ranks[0].push_back({TaskKind::forward, 2, 0});
  EXPECT_TRUE(refused(wrong, "rank 0: task F2.0 appears twice, at 3 and 8"));
  wrong.ranks[0].back().microbatch = 0;
  EXPECT_TRUE(refused(wrong, "rank 0: task F0.0 appears twice, at 0 and 8"));
  wrong = small();
  std::swap(wrong.ranks[1][0], wrong.ranks[1][1]);
  EXPECT_TRUE(refused(wrong, "rank 1: task B0.0 at position 0 comes before F0.0 at 1"));
  wrong = small();
  wrong.ranks[0][3].microbatch = 4;
  EXPECT_TRUE(refused(wrong, "rank 0, position 3: task F4.0 is not one of this schedule"));
  wrong = small();
  wrong.ranks[0][3].chunk = 1;
  EXPECT_TRUE(refused(wrong, "rank 0, position 3: task F2.1 is not one"));
  wrong = small();
  wrong.ranks[0].push_back({TaskKind::weight, 0, 0});
  EXPECT_TRUE(refused(wrong, "rank 0, position 8: task W0.0 is not one"));
  wrong.ranks.clear();
  EXPECT_TRUE(refused(wrong, "schedule of 0 ranks"));
}

TEST(ScheduleCheck, WeightPartsBelongBehindTheirBackward) {
  PipelineSchedule wrong =
      make_schedule({.pipeline = 2, .microbatches = 3, .family = ScheduleFamily::zb_h1});
  std::swap(wrong.ranks[0][2], wrong.ranks[0][3]);
  EXPECT_TRUE(refused(wrong, "rank 0: task W0.0 at position 2 comes before B0.0 at 3"));
  wrong.ranks[0].erase(wrong.ranks[0].begin() + 2);
  EXPECT_TRUE(refused(wrong, "rank 0: task W0.0 is missing"));
}

TEST(ScheduleCheck, DependenciesThatAreNeverMet) {
  PipelineSchedule wrong = small();  // rank 0 wants a gradient whose activation it has not sent
  std::swap(wrong.ranks[0][1], wrong.ranks[0][2]);
  check_schedule(wrong);
  std::swap(wrong.ranks[1][1], wrong.ranks[1][2]);
  EXPECT_TRUE(refused(wrong,
                      "the schedule deadlocks: rank 0 waits at position 1, task B0.0, for "
                      "B0.0 of rank 1; rank 1 waits at position 1, task F1.0, for F1.0 of "
                      "rank 0"));
}

/// Each task directly between its receive and its send, with no further ordering.
StepLists naive_steps(const PipelineSchedule& schedule) {
  StepLists steps(schedule.ranks.size());
  for (size_t r = 0; r < steps.size(); ++r)
    for (const PipelineTask& task : schedule.ranks[r]) {
      const auto rank = static_cast<int64_t>(r);
      const auto producer = schedule.producer_of(rank, task);
      const auto consumer = schedule.consumer_of(rank, task);
      if (producer && producer->rank != rank)
        steps[r].push_back({Kind::receive, task, producer->rank});
      steps[r].push_back({Kind::compute, task});
      if (consumer) steps[r].push_back({Kind::send, task, consumer->rank});
    }
  return steps;
}

using Starts = std::vector<std::vector<size_t>>;

/// Runs `steps` as an executor would: each receive starts once, no later than at its place;
/// transfers with one rank start in list order; at most two inputs of a kind wait for their tasks.
void expect_early_receives(const std::vector<PipelineStep>& steps, const Starts& starts) {
  ASSERT_EQ(starts.size(), steps.size());
  std::map<int64_t, size_t> last;
  std::map<std::pair<int64_t, TaskKind>, std::vector<PipelineTask>> waiting;
  size_t started = 0;
  const auto start = [&](size_t step) {
    const auto [place, first] = last.emplace(steps[step].peer, step);
    EXPECT_TRUE(first || place->second < step) << to_string(steps[step]);
    place->second = step;
  };
  for (size_t i = 0; i < steps.size(); ++i) {
    for (const size_t receive : starts[i]) {
      ASSERT_EQ(steps[receive].kind, Kind::receive);
      EXPECT_GE(receive, i);
      start(receive);
      waiting[{steps[receive].peer, steps[receive].task.kind}].push_back(steps[receive].task);
      ++started;
    }
    if (steps[i].kind == Kind::send) start(i);
    if (steps[i].kind != Kind::compute) continue;
    for (auto& [source, tasks] : waiting) std::erase(tasks, steps[i].task);
    if (i + 1 == steps.size() || steps[i + 1].kind != Kind::compute) continue;
    for (const auto& [source, tasks] : waiting) EXPECT_LE(tasks.size(), 2U);
  }
  const auto receives = std::count_if(steps.begin(), steps.end(), [](const PipelineStep& step) {
    return step.kind == Kind::receive;
  });
  EXPECT_EQ(started, static_cast<size_t>(receives));
}

/// The steps of each rank with its receives where they start.
StepLists in_order_of_starts(const StepLists& steps) {
  StepLists result(steps.size());
  for (size_t r = 0; r < steps.size(); ++r) {
    const Starts starts = early_receives(steps, static_cast<int64_t>(r));
    for (size_t i = 0; i < steps[r].size(); ++i) {
      for (const size_t receive : starts[i]) result[r].push_back(steps[r][receive]);
      if (steps[r][i].kind != Kind::receive) result[r].push_back(steps[r][i]);
    }
  }
  return result;
}

std::vector<std::string> texts_of_steps(const ScheduleOptions& options) {
  std::vector<std::string> texts;
  for (const auto& rank : communication_steps(make_schedule(options))) {
    texts.emplace_back();
    for (const PipelineStep& step : rank)
      texts.back() += (texts.back().empty() ? "" : ", ") + to_string(step);
  }
  return texts;
}

TEST(CommunicationSteps, OfTwoRanks) {
  const std::vector<std::string> texts = texts_of_steps({.pipeline = 2, .microbatches = 2});
  EXPECT_EQ(texts[0],
            "F0.0, send F0.0 to rank 1, F1.0, send F1.0 to rank 1, receive for B0.0 from rank 1, "
            "B0.0, receive for B1.0 from rank 1, B1.0");
  EXPECT_EQ(texts[1],
            "receive for F0.0 from rank 0, F0.0, receive for F1.0 from rank 0, B0.0, send B0.0 to "
            "rank 0, F1.0, B1.0, send B1.0 to rank 0");
}

TEST(CommunicationSteps, NeighbouringPairsExchangeAtOnce) {
  const std::vector<std::string> texts =
      texts_of_steps({.pipeline = 4, .microbatches = 2, .forward_only = true});
  EXPECT_EQ(texts[1],
            "receive for F0.0 from rank 0, F0.0, receive for F1.0 from rank 0, send F0.0 to rank "
            "2, F1.0, send F1.0 to rank 2");
  EXPECT_EQ(texts[2],
            "receive for F0.0 from rank 1, F0.0, send F0.0 to rank 3, receive for F1.0 from rank "
            "1, F1.0, send F1.0 to rank 3");
}

TEST(EarlyReceives, StartOverComputationsButNotOverTransfersWithTheSameRank) {
  const StepLists steps = communication_steps(make_schedule({.pipeline = 2, .microbatches = 2}));
  // F0, send, F1, send, receive for B0, B0, receive for B1, B1
  EXPECT_EQ(early_receives(steps, 0), (Starts{{}, {}, {}, {}, {4}, {6}, {}, {}}));
  // receive for F0, F0, receive for F1, B0, send, F1, B1, send
  EXPECT_EQ(early_receives(steps, 1), (Starts{{0}, {2}, {}, {}, {}, {}, {}, {}}));
}

TEST(EarlyReceives, InACircleDoNotStartOverOtherTransfers) {
  const PipelineSchedule schedule = make_schedule({.pipeline = 3,
                                                   .virtual_pipeline = 2,
                                                   .microbatches = 4,
                                                   .microbatch_group_size = 4,
                                                   .forward_only = true});
  const StepLists steps = in_order_of_starts(communication_steps(schedule));
  std::string text;
  for (const PipelineStep& step : steps[0]) text += (text.empty() ? "" : ", ") + to_string(step);
  EXPECT_EQ(text,
            "F0.0, send F0.0 to rank 1, F1.0, send F1.0 to rank 1, F2.0, send F2.0 to rank 1, "
            "receive for F0.1 from rank 2, F3.0, send F3.0 to rank 1, receive for F1.1 from rank "
            "2, F0.1, send F0.1 to rank 1, receive for F2.1 from rank 2, F1.1, send F1.1 to rank "
            "1, receive for F3.1 from rank 2, F2.1, send F2.1 to rank 1, F3.1, send F3.1 to rank "
            "1");
}

TEST(EarlyReceives, OfAnySchedule) {
  for (const int64_t ranks : {2, 3, 5, 8})
    for (const int64_t chunks : {1, 2, 4})
      for (const auto family :
           {ScheduleFamily::one_f_one_b, ScheduleFamily::gpipe, ScheduleFamily::zb_h1}) {
        if (chunks > 1 && family != ScheduleFamily::one_f_one_b) continue;
        const StepLists steps = communication_steps(make_schedule({.pipeline = ranks,
                                                                   .virtual_pipeline = chunks,
                                                                   .microbatches = 3 * ranks,
                                                                   .family = family}));
        for (int64_t rank = 0; rank < ranks; ++rank)
          expect_early_receives(steps[static_cast<size_t>(rank)], early_receives(steps, rank));
      }
}

/// A host that waits for its device waits for every receive that has started.
TEST(EarlyReceives, DoNotLockUpEvenIfEveryHostAlwaysWaitsForItsDevice) {
  const auto check = [](const ScheduleOptions& options) {
    const PipelineSchedule schedule = make_schedule(options);
    const StepLists steps = in_order_of_starts(communication_steps(schedule));
    EXPECT_NO_THROW(simulate_rendezvous(schedule, steps, reference_cost(schedule)))
        << options.pipeline << " x " << options.virtual_pipeline << ", " << options.microbatches
        << " micro-batches, " << to_string(options.family);
  };
  for (const int64_t ranks : {2, 3, 4, 5, 8})
    for (const int64_t microbatches : {ranks, 2 * ranks, 3 * ranks})
      for (const bool forward_only : {false, true}) {
        for (const int64_t chunks : {2, 3, 4})
          for (const int64_t group : {ranks, microbatches})
            check({.pipeline = ranks,
                   .virtual_pipeline = chunks,
                   .microbatches = microbatches,
                   .microbatch_group_size = group,
                   .forward_only = forward_only});
        for (const auto family :
             {ScheduleFamily::one_f_one_b, ScheduleFamily::gpipe, ScheduleFamily::zb_h1})
          check({.pipeline = ranks,
                 .microbatches = microbatches,
                 .family = family,
                 .forward_only = forward_only});
      }
}

TEST(CommunicationSteps, TheNaiveOrderLocksUp) {
  const PipelineSchedule schedule = small();
  EXPECT_TRUE(throws_with<UsageError>(
      [&] { simulate_rendezvous(schedule, naive_steps(schedule), reference_cost(schedule)); },
      "the schedule deadlocks: rank 0 is stuck at step 3, send F1.0 to rank 1; rank 1 is stuck at "
      "step 3, send B0.0 to rank 0"));
}

TEST(CommunicationSteps, WrongStepsAreRefused) {
  const PipelineSchedule schedule = small();
  const auto wrong = [&](const std::function<void(StepLists&)>& edit, const std::string& part) {
    StepLists steps = communication_steps(schedule);
    edit(steps);
    const auto run = [&] { simulate_rendezvous(schedule, steps, reference_cost(schedule)); };
    return throws_with<UsageError>(run, part);
  };
  EXPECT_TRUE(wrong([](StepLists& s) { std::swap(s[0][0], s[0][1]); },
                    "rank 0: send F0.0 to rank 1 comes before the task has run"));
  EXPECT_TRUE(wrong([](StepLists& s) { std::swap(s[1][0], s[1][1]); },
                    "rank 1: task F0.0 starts before its input has come"));
  EXPECT_TRUE(
      wrong([](StepLists& s) { s[1][0].task.microbatch = 1; },
            "rank 0: 'send F0.0 to rank 1' meets 'receive for F1.0 from rank 0' of rank 1"));
  EXPECT_TRUE(
      wrong([](StepLists& s) { s[0][1].peer = 2; }, "rank 0: send F0.0 to rank 2: no such peer"));
  EXPECT_TRUE(wrong([](StepLists& s) { s[0].erase(s[0].end() - 2); },
                    "rank 0: task B3.0 starts before its"));
  EXPECT_TRUE(wrong([](StepLists& s) { s[0].pop_back(); }, "rank 0: 7 of 8 tasks"));
  EXPECT_TRUE(wrong([](StepLists& s) { std::swap(s[0][0], s[0][2]); },
                    "rank 0: step F1.0 is not task 0 of the schedule"));
  EXPECT_TRUE(wrong([](StepLists& s) { s.pop_back(); }, "steps of 1 ranks, schedule of 2"));
}

}  // namespace
}  // namespace lockstep
