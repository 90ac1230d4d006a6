#pragma once

// Internal.

#include <vector>

#include "lockstep/core/config.h"
#include "lockstep/planner/machine.h"

namespace lockstep {

/// Jobs of one rank whose operators have so little to do that the host takes most of a step: one
/// with RMSNorm and SwiGLU, one with LayerNorm, GELU and biases; four micro-batches each.
std::vector<Config> step_trials();

/// Median time of a training step of such a job on this thread.
double step_seconds(const Config& config, double seconds);

/// The time that the host needs for each kernel in a step, with all that it does in between: that
/// with which simulate_step() gives the sum of `measured`, the steps of step_trials(). At least
/// `least`. `machine` is complete but for launch_s. The PlannedDevice must not be in use.
double launch_seconds_of(const std::vector<double>& measured, Machine machine, double least);

}  // namespace lockstep
