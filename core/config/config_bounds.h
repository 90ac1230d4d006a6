#pragma once

// Internal: the bounds of a part of the configuration that did not come through parse_config().

#include "lockstep/core/config.h"

namespace lockstep {

/// ConfigError naming the field: a number of `config` that is not finite or out of the bounds that
/// config.proto gives it.
void check_bounds(const OptimizerConfig& config);
void check_bounds(const DistributedDataParallelConfig& config);
void check_bounds(const TrainConfig& config);

}  // namespace lockstep
