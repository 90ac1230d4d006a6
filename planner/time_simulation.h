#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "lockstep/parallel_state/job_program.h"
#include "lockstep/planner/machine.h"

/// How long a training step takes, found by running recorded programs with a machine's costs. Needs
/// no libtorch.
namespace lockstep {

/// The time of one rank in a step. The parts add up to the step.
struct RankTime {
  int64_t rank = 0;        ///< the first of the ranks that do the same
  int64_t num_ranks = 0;   ///< that do
  double compute_s = 0;    ///< kernels up to the last one of backward, and waits for their launch
  double optimizer_s = 0;  ///< kernels after it
  /// Seconds that the device waits for an operation in progress, by group; also those of its host
  /// while the device is idle, if a kernel comes next, and of several operations for the last one.
  std::map<std::string, double> exposed_s = {};
  double bubble_s = 0;  ///< that it waits for other ranks, and for the slowest at the end

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

/// Simulates the last step of `job`, whose programs have kernels and one more step before it. That
/// step is the warm-up: work that overlaps the end of a step then takes part in the next.
///
/// A rank's device has one stream of kernels, which run one after the other; one stream for the
/// collectives of each communicator; and one for the messages of each pair of ranks, under NCCL's
/// rules. An operation starts on a rank once the stream of kernels has reached it and the
/// operations before it on its own stream are done; it runs once it has started on all its ranks.
/// Streams run concurrently; when the device waits for an operation, the kernels that ran meanwhile
/// have taken longer by the link's occupancy. Links are not shared: of two concurrent operations
/// each has the whole link.
///
/// The host takes Machine::launch_s for each kernel and operation, and waits for its device when it
/// reads from it. Otherwise it runs ahead, unless the machine is synchronous: there launches and
/// kernels alternate. If the ranks of a host share Machine::cores, everything that runs at a moment
/// gets an equal share of them: the time of a kernel then includes that without a core. All ranks
/// of a class (see JobGroups) take the same time, in an operation that of the rank of the class
/// whose group has the worst placement on hosts.
///
/// ConfigError if ranks share cores and are on several hosts.
/// UsageError: programs without kernels or with fewer than two steps, or whose ranks wait for each
/// other in a cycle, which prove_order() explains; also as for JobGroups.
StepTime simulate_step(const JobProgram& job, const Machine& machine);

}  // namespace lockstep
