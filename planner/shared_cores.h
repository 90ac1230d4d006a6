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
/// ConfigError if the job needs more than one host.
StepTime simulate_shared_cores(const JobProgram& job, const Machine& machine);

}  // namespace lockstep
