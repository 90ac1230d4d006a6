#pragma once

#include <string>

#include "lockstep/parallel_state/parallel_state.h"
#include "lockstep/training/trainer.h"

namespace lockstep {

/// `lockstep train --audit`: measures what becomes of each gradient, compares that with
/// plan_audit(), and writes run_files(output).audit, where `output` is not empty. Collective over
/// all ranks. Returns what rank 0 tells of it: a line for each parameter, then their number.
/// UsageError, on all ranks, where what was measured is not what was worked out, naming the first
/// differences.
std::string audit_gradients(Trainer& trainer, const std::string& output,
                            const ParallelState& state);

}  // namespace lockstep
