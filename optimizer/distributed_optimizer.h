#pragma once

#include "lockstep/optimizer/optimizer.h"

namespace lockstep {

/// Megatron Core's name for an optimizer whose state is sharded over the data-parallel ranks.
/// Optimizer does that for models with ddp.use_distributed_optimizer.
using DistributedOptimizer = Optimizer;

}  // namespace lockstep
