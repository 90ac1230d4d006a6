#pragma once

#include "lockstep/core/config.h"

namespace lockstep {

/// Throws ConfigError if the fields of `model`, resolved, and `parallel` that speak of experts
/// contradict each other.
void check_experts(const TransformerConfig& model, const ParallelConfig& parallel);

}  // namespace lockstep
