#include "lockstep/pipeline/schedule_check.h"

#include <algorithm>

#include "lockstep/core/check.h"
#include "lockstep/pipeline/simulation.h"
#include "lockstep/pipeline/task_table.h"

namespace lockstep {
namespace {

bool may_hold(const PipelineSchedule& schedule, const PipelineTask& task) {
  const bool kind =
      task.kind == TaskKind::forward ||
      (!schedule.forward_only && (task.kind == TaskKind::backward || schedule.split_backward));
  return kind && task.microbatch >= 0 && task.microbatch < schedule.microbatches &&
         task.chunk >= 0 && task.chunk < schedule.chunks;
}

/// The kinds of tasks of the schedule, in the order in which one micro-batch runs them.
std::vector<TaskKind> kinds_of(const PipelineSchedule& schedule) {
  if (schedule.forward_only) return {TaskKind::forward};
  if (!schedule.split_backward) return {TaskKind::forward, TaskKind::backward};
  return {TaskKind::forward, TaskKind::backward, TaskKind::weight};
}

void check_rank(const PipelineSchedule& schedule, int64_t rank) {
  const auto& tasks = schedule.ranks[static_cast<size_t>(rank)];
  TaskTable<int64_t> positions(schedule, -1);
  for (size_t i = 0; i < tasks.size(); ++i) {
    const PipelineTask& task = tasks[i];
    require<UsageError>(may_hold(schedule, task),
                        "rank {}, position {}: task {} is not one of this schedule ({} "
                        "micro-batches, {} chunks{}{})",
                        rank, i, to_string(task), schedule.microbatches, schedule.chunks,
                        schedule.split_backward ? ", backward split" : "",
                        schedule.forward_only ? ", forward only" : "");
    int64_t& position = positions[task];
    require<UsageError>(position < 0, "rank {}: task {} appears twice, at {} and {}", rank,
                        to_string(task), position, i);
    position = static_cast<int64_t>(i);
  }
  const std::vector<TaskKind> kinds = kinds_of(schedule);
  for (int64_t chunk = 0; chunk < schedule.chunks; ++chunk)
    for (int64_t microbatch = 0; microbatch < schedule.microbatches; ++microbatch)
      for (size_t k = 0; k < kinds.size(); ++k) {
        const PipelineTask task{kinds[k], microbatch, chunk};
        require<UsageError>(positions[task] >= 0, "rank {}: task {} is missing", rank,
                            to_string(task));
        if (k == 0) continue;
        const PipelineTask before{kinds[k - 1], microbatch, chunk};
        require<UsageError>(positions[before] < positions[task],
                            "rank {}: task {} at position {} comes before {} at {}", rank,
                            to_string(task), positions[task], to_string(before), positions[before]);
      }
}

}  // namespace

void check_tasks(const PipelineSchedule& schedule) {
  require<UsageError>(
      schedule.pipeline() >= 1 && schedule.chunks >= 1 && schedule.microbatches >= 1,
      "schedule of {} ranks, {} chunks, {} micro-batches: allowed: >= 1", schedule.pipeline(),
      schedule.chunks, schedule.microbatches);
  for (int64_t rank = 0; rank < schedule.pipeline(); ++rank) check_rank(schedule, rank);
}

void check_schedule(const PipelineSchedule& schedule) {
  simulate(schedule, reference_cost(schedule));
}

std::vector<int64_t> peak_live_microbatches(const PipelineSchedule& schedule) {
  const TaskKind end = kinds_of(schedule).back();
  std::vector<int64_t> peaks;
  for (const auto& tasks : schedule.ranks) {
    int64_t alive = 0, peak = 0;
    for (const PipelineTask& task : tasks) {
      alive += task.kind == TaskKind::forward ? 1 : 0;
      peak = std::max(peak, alive);
      alive -= task.kind == end ? 1 : 0;
    }
    peaks.push_back(peak);
  }
  return peaks;
}

}  // namespace lockstep
