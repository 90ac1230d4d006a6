#pragma once

#include "lockstep/optimizer/optimizer.h"

namespace lockstep {

/// The name that Megatron Core has for an optimizer whose state is cut over the data-parallel
/// ranks. Optimizer does that for models with ddp.use_distributed_optimizer.
using DistributedOptimizer = Optimizer;

}  // namespace lockstep
