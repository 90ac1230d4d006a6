#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "lockstep/parallel_state/job_program.h"
#include "lockstep/planner/machine.h"

/// How long a training step takes, by running recorded programs on a machine's costs. Needs no
/// libtorch.
namespace lockstep {

/// What one rank does in a step. The parts add up to the step.
struct RankTime {
  int64_t rank = 0;        ///< the first of those that do the same
  int64_t num_ranks = 0;   ///< that do
  double compute_s = 0;    ///< kernels up to the last one of backward, and waits for their host
  double optimizer_s = 0;  ///< kernels after it
  /// Seconds in which the device waits for an operation that is under way, by group.
  std::map<std::string, double> exposed_s = {};
  double bubble_s = 0;  ///< in which it waits for other ranks, and for the slowest at the end

  double exposed_total_s() const;
};

struct StepTime {
  double step_s = 0;
  std::vector<RankTime> ranks;  ///< one of each class of ranks that stay in step

  /// Averages over all ranks.
  double compute_s() const;
  double optimizer_s() const;
  double exposed_s() const;
  double bubble_s() const;
};

/// The last step of `job`, whose programs have kernels and one step more before it, which warms up:
/// what overlaps a step's end takes part in it.
///
/// A rank's device has one stream of kernels, which run one after the other; one for the
/// collectives of each communicator and one for the messages of each pair of ranks, under NCCL's
/// rules. An operation starts on a rank once the stream of kernels has come to it and those before
/// it on its own stream are done; it runs once it has started on all its ranks. Streams run side by
/// side; when the device waits for an operation, the kernels that ran meanwhile have taken longer
/// by the link's occupancy. Links are not shared: two operations at once have all of theirs each.
///
/// The host takes Machine::launch_s for each kernel and operation, and waits for its device where
/// it reads from it. Else it is ahead, unless the machine is synchronous: there the launches and
/// the kernels follow each other. All ranks of a class (see JobGroups) take the same time.
///
/// UsageError: programs without kernels or with fewer than two steps, or whose ranks wait for each
/// other in a circle, which prove_order() explains; as JobGroups.
StepTime simulate_step(const JobProgram& job, const Machine& machine);

}  // namespace lockstep
