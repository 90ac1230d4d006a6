#pragma once

// Internal.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lockstep/parallel_state/job_program.h"
#include "lockstep/planner/machine.h"
#include "lockstep/planner/time_simulation.h"

namespace lockstep {

/// A rank that represents its class in a simulation, and how far it is in its program.
class SimulatedRank {
 public:
  /// An operation that the rank has started.
  struct Started {
    uint32_t operation = 0;  ///< its number in JobOperations
    uint32_t call = 0;       ///< of the program
    size_t event = 0;        ///< that started it
  };

  /// Both must outlive it. UsageError: see simulate_step().
  SimulatedRank(const RankProgram& program, int64_t first_rank, const Machine& machine);

  /// The event that comes next; nullptr after the last step. Ends a step whose events are over.
  const ProgramEvent* next_event();
  bool in_last_step() const { return step_ + 1 == program->step_ends.size(); }
  bool has_ended() const { return step_ == program->step_ends.size(); }

  /// The device has worked for this long on what belongs to `event`. Only the last step counts,
  /// here and below.
  void add_work(double seconds, size_t event);
  /// It has waited for an operation that was running.
  void add_exposed(const Started& started, double seconds);

  const RankProgram* program;
  std::vector<double> kernel_seconds = {};  ///< of each kernel of the program
  size_t event = 0;                         ///< the number of the next one
  double time = 0;                          ///< that has passed, on the stream of kernels
  double step_begin = 0;                    ///< of the last step
  std::vector<Started> operations = {};
  RankTime spent = {};

 private:
  size_t step_ = 0;           ///< the step that is under way
  size_t last_backward_ = 0;  ///< event of the last step's last kernel of backward
};

/// The classes' numbers of ranks are added, and the result is that of simulate_step(). UsageError
/// if a rank has not ended.
StepTime step_time(std::vector<SimulatedRank*> ranks, const JobProgram& job,
                   const JobGroups& groups);

}  // namespace lockstep
