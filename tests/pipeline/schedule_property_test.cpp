// Schedules for up to 16 ranks, 4 chunks and 64 micro-batches: all that are not interleaved, and
// all small and some large interleaved ones.

#include <gtest/gtest.h>

#include <algorithm>

#include "lockstep/core/error.h"
#include "lockstep/pipeline/first_messages.h"
#include "lockstep/pipeline/schedule_check.h"
#include "lockstep/pipeline/simulation.h"

namespace lockstep {
namespace {

constexpr int64_t kRanks = 16, kMicrobatches = 64;

/// Calls `check` with every legal number of micro-batches and every legal group size for `ranks` x
/// `chunks`.
template <class Check>
void for_each_shape(int64_t ranks, int64_t chunks, Check check) {
  for (int64_t m = chunks > 1 ? ranks : 1; m <= kMicrobatches; ++m)
    for (int64_t n = ranks; n <= (chunks > 1 ? m : ranks); ++n)
      if (chunks == 1 || m % n == 0 || m % n >= ranks)
        check(ScheduleOptions{.pipeline = ranks,
                              .virtual_pipeline = chunks,
                              .microbatches = m,
                              .microbatch_group_size = n});
}

std::string name(const ScheduleOptions& o) {
  return std::string(to_string(o.family)) + " P " + std::to_string(o.pipeline) + " V " +
         std::to_string(o.virtual_pipeline) + " M " + std::to_string(o.microbatches) + " N " +
         std::to_string(o.group_size());
}

/// Whether each rank runs each task once, counted independently.
bool every_task_once(const ScheduleOptions& options, const PipelineSchedule& schedule) {
  const int64_t kinds = schedule.split_backward ? 3 : 2;
  const auto tasks = static_cast<size_t>(kinds * options.virtual_pipeline * options.microbatches);
  for (const auto& rank : schedule.ranks) {
    std::vector<bool> seen(tasks, false);
    for (const PipelineTask& task : rank)
      seen[static_cast<size_t>(
          (static_cast<int64_t>(task.kind) * options.virtual_pipeline + task.chunk) *
              options.microbatches +
          task.microbatch)] = true;
    if (rank.size() != tasks || !std::all_of(seen.begin(), seen.end(), [](bool s) { return s; }))
      return false;
  }
  return true;
}

/// Whether each task starts after its inputs were made, on its own rank and on others.
bool dependencies_hold(const PipelineSchedule& schedule, const Timeline& timeline) {
  const int64_t stages = schedule.pipeline() * schedule.chunks;
  const auto at = [&](int64_t kind, int64_t stage, int64_t m) {
    return static_cast<size_t>((kind * stages + stage) * schedule.microbatches + m);
  };
  std::vector<TaskTime> times(static_cast<size_t>(3 * stages * schedule.microbatches));
  for (size_t rank = 0; rank < schedule.ranks.size(); ++rank)
    for (size_t i = 0; i < schedule.ranks[rank].size(); ++i) {
      const PipelineTask& task = schedule.ranks[rank][i];
      if (i > 0 && timeline.ranks[rank][i].start < timeline.ranks[rank][i - 1].end) return false;
      times[at(static_cast<int64_t>(task.kind),
               task.chunk * schedule.pipeline() + static_cast<int64_t>(rank), task.microbatch)] =
          timeline.ranks[rank][i];
    }
  for (int64_t stage = 0; stage < stages; ++stage)
    for (int64_t m = 0; m < schedule.microbatches; ++m) {
      const TaskTime f = times[at(0, stage, m)], b = times[at(1, stage, m)];
      if (stage > 0 && f.start < times[at(0, stage - 1, m)].end) return false;
      if (b.start < f.end) return false;
      if (stage + 1 < stages && b.start < times[at(1, stage + 1, m)].end) return false;
      if (schedule.split_backward && times[at(2, stage, m)].start < b.end) return false;
    }
  return true;
}

/// Forwards before the first backward of `rank`, minus the one that is paired with it.
int64_t forwards_ahead(const PipelineSchedule& schedule, size_t rank) {
  const auto& tasks = schedule.ranks[rank];
  const auto first = std::find_if(tasks.begin(), tasks.end(), [](const PipelineTask& task) {
    return task.kind == TaskKind::backward;
  });
  return first - tasks.begin() - 1;
}

struct Checked {
  PipelineSchedule schedule;
  int64_t makespan;
};

bool hosts_meet(const StepLists& steps, const RankPairs& connected) {
  try {
    check_first_messages(steps, connected);
    return true;
  } catch (const UsageError&) {
    return false;
  }
}

/// Checks what holds for every schedule: with transfers that never block, with blocking ones, and
/// with ones of which only the first in a direction blocks.
Checked check(const ScheduleOptions& options) {
  const PipelineSchedule schedule = make_schedule(options);
  EXPECT_TRUE(every_task_once(options, schedule)) << name(options);
  const Timeline free = simulate(schedule, reference_cost(schedule));
  EXPECT_TRUE(dependencies_hold(schedule, free)) << name(options);
  const StepLists steps = communication_steps(schedule);
  const Timeline blocking = simulate_rendezvous(schedule, steps, reference_cost(schedule));
  EXPECT_TRUE(dependencies_hold(schedule, blocking)) << name(options);
  EXPECT_GE(blocking.makespan(), free.makespan()) << name(options);
  EXPECT_TRUE(hosts_meet(steps, message_pairs(steps))) << name(options);
  EXPECT_TRUE(hosts_meet(steps, {})) << name(options);
  return {schedule, free.makespan()};
}

TEST(ScheduleProperty, OneFOneB) {
  for (int64_t ranks = 1; ranks <= kRanks; ++ranks)
    for_each_shape(ranks, 1, [&](const ScheduleOptions& options) {
      const auto [schedule, makespan] = check(options);
      const int64_t m = options.microbatches;
      ASSERT_EQ(makespan, 3 * (m + ranks - 1)) << name(options);
      const std::vector<int64_t> alive = peak_live_microbatches(schedule);
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const int64_t ahead = std::min(ranks - rank - 1, m - 1);
        ASSERT_EQ(alive[static_cast<size_t>(rank)], std::min(ranks - rank, m)) << name(options);
        ASSERT_EQ(forwards_ahead(schedule, static_cast<size_t>(rank)), ahead) << name(options);
      }
    });
}

TEST(ScheduleProperty, Gpipe) {
  for (int64_t ranks = 1; ranks <= kRanks; ++ranks)
    for_each_shape(ranks, 1, [&](ScheduleOptions options) {
      options.family = ScheduleFamily::gpipe;
      ASSERT_EQ(check(options).makespan, 3 * (options.microbatches + ranks - 1)) << name(options);
    });
}

TEST(ScheduleProperty, ZeroBubble) {
  for (int64_t ranks = 1; ranks <= kRanks; ++ranks)
    for_each_shape(ranks, 1, [&](ScheduleOptions options) {
      options.family = ScheduleFamily::zb_h1;
      const auto [schedule, makespan] = check(options);
      const int64_t m = options.microbatches;
      if (m >= ranks) {
        ASSERT_EQ(makespan, 3 * m + ranks - 1) << name(options);
      }
      ASSERT_LE(makespan, 3 * (m + ranks - 1) - (ranks > 1 ? 1 : 0)) << "1F1B, " << name(options);
      for (const int64_t alive : peak_live_microbatches(schedule))
        ASSERT_EQ(alive, std::min(ranks, m)) << name(options);
    });
}

/// All small shapes; of the large ones, one in kSample and, with the default group size, those with
/// a multiple of 8 micro-batches.
constexpr int64_t kSmall = 128, kSample = 61;

void check_interleaved(int64_t chunks) {
  for (int64_t ranks = 2, i = 0; ranks <= kRanks; ++ranks)
    for_each_shape(ranks, chunks, [&](const ScheduleOptions& options) {
      const int64_t m = options.microbatches, n = options.group_size();
      if (ranks * chunks * m > kSmall && ++i % kSample != 0 && (n != ranks || m % 8 != 0)) return;
      const auto [schedule, makespan] = check(options);
      const int64_t best = 3 * (m * chunks + ranks - 1);
      ASSERT_GE(makespan, best) << name(options);
      if (m % ranks == 0 && n == ranks) {
        ASSERT_EQ(makespan, best) << name(options);
      }
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const int64_t ahead = std::min(2 * (ranks - rank - 1) + (chunks - 1) * n, m * chunks - 1);
        ASSERT_EQ(forwards_ahead(schedule, static_cast<size_t>(rank)), ahead) << name(options);
      }
    });
}

TEST(ScheduleProperty, InterleavedWithTwoChunks) { check_interleaved(2); }
TEST(ScheduleProperty, InterleavedWithThreeChunks) { check_interleaved(3); }
TEST(ScheduleProperty, InterleavedWithFourChunks) { check_interleaved(4); }

}  // namespace
}  // namespace lockstep
