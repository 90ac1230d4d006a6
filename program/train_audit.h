#pragma once

#include <string>

#include "lockstep/parallel_state/parallel_state.h"
#include "lockstep/training/trainer.h"

namespace lockstep {

/// `lockstep train --audit`: measures what happens to each gradient, compares that with
/// plan_audit(), and writes run_files(output).audit unless `output` is empty. Collective over all
/// ranks. Returns rank 0's report: a line for each parameter, then their number. UsageError, on all
/// ranks, naming the first differences, if the measured effects are not the computed ones.
std::string audit_gradients(Trainer& trainer, const std::string& output,
                            const ParallelState& state);

}  // namespace lockstep
