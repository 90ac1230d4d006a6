#pragma once

// Internal.

#include "lockstep/parallel_state/job_program.h"
#include "lockstep/planner/machine.h"
#include "lockstep/planner/time_simulation.h"

namespace lockstep {

/// simulate_step() on one host whose ranks share its Machine::cores. Everything that runs at a
/// moment gets the same share of a core, at most a whole one. A kernel or a launch counts as one
/// core, an operation as one for each rank that waits for it and as its occupancy for each other
/// rank. A rank that waits for ranks that have not come leaves its core to others, so a bubble of
/// one rank is another one's time. Each pass of time looks at all classes of ranks.
///
/// ConfigError as check_shared_cores().
StepTime simulate_shared_cores(const JobProgram& job, const Machine& machine);

/// ConfigError if ranks of `machine` share cores and `world_size` ranks need more than one host.
void check_shared_cores(const Machine& machine, int64_t world_size);

}  // namespace lockstep
