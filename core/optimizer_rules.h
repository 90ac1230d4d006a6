#pragma once

#include "lockstep/core/config.h"

/// What the kinds of optimizer ask of a configuration. Nothing here needs libtorch.
namespace lockstep {

/// ConfigError, naming the fields, for a resolved configuration: moments in bf16 without moments
/// or beside fp64 parameters, a lowest loss scale above the first one, a gather of parameters that
/// is aligned but not overlapped, gradients that are to be added in fp32 although nothing is
/// exchanged, or over several replicas of the optimizer.
void check_optimizer(const Config& config);

}  // namespace lockstep
