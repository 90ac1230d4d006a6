#include "lockstep/optimizer/distributed_optimizer.h"

namespace lockstep {

std::unique_ptr<Optimizer> make_optimizer(std::vector<DistributedDataParallel*> models,
                                          const OptimizerConfig& config,
                                          const std::vector<ParamOverride>& overrides) {
  if (!models.empty() && models.front()->is_sharded())
    return std::make_unique<DistributedOptimizer>(std::move(models), config, overrides);
  return std::make_unique<Optimizer>(std::move(models), config, overrides);
}

}  // namespace lockstep
