#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "lockstep/pipeline/communication_steps.h"
#include "lockstep/pipeline/schedule.h"

/// When each task of a schedule runs, by simulating all ranks. Times are integers in a unit of your
/// choice (ticks, nanoseconds), so sums are exact.
namespace lockstep {

/// How long `task` takes on `rank`: at least 1.
using TaskCost = std::function<int64_t(int64_t rank, const PipelineTask& task)>;

/// Forward 1 and backward 2 on every rank; if backward is split, 1 for each of its parts. (With V
/// chunks one unit is 1/V of a forward through all layers of a rank.)
TaskCost reference_cost(const PipelineSchedule& schedule);

struct TaskTime {
  int64_t start = 0;
  int64_t end = 0;
};

/// Start and end of every task, at the task's position in PipelineSchedule::ranks. The first task
/// starts at 0.
struct Timeline {
  std::vector<std::vector<TaskTime>> ranks = {};

  int64_t makespan() const;
  /// Time in which `rank` runs a task.
  int64_t busy(int64_t rank) const;
  /// Idle time over total time, both summed over the ranks: 1 - busy / (P x makespan).
  double bubble_fraction() const;
};

/// Each rank runs its tasks in order, each as soon as the rank is free and its input has arrived:
/// `transfer` after another rank computed it, or 0 on the same rank. Sends do not block. Takes time
/// linear in the number of tasks. UsageError: as check_schedule(); a cost below 1 or a negative
/// transfer.
Timeline simulate(const PipelineSchedule& schedule, const TaskCost& cost, int64_t transfer = 0);

/// Each rank takes its steps in order, and each send and each receive blocks its rank until the
/// other side reaches the same transfer, which then takes no time: the worst case of a transport
/// without buffers. UsageError: as check_tasks(); steps that deadlock (with the step at which each
/// rank is stuck), a send that meets a different receive, a task that starts before its input has
/// arrived, steps whose tasks are not those of `schedule` in the same order.
Timeline simulate_rendezvous(const PipelineSchedule& schedule, const StepLists& steps,
                             const TaskCost& cost);

}  // namespace lockstep
