#include "lockstep/optimizer/distributed_optimizer.h"

namespace lockstep {

void DistributedOptimizer::before_update() {
  for (DistributedDataParallel* model : models()) model->finish_param_sync();
}

void DistributedOptimizer::after_update() {
  for (DistributedDataParallel* model : models()) model->note_params_changed();
  for (DistributedDataParallel* model : models()) model->start_param_sync();
}

std::unique_ptr<Optimizer> make_optimizer(std::vector<DistributedDataParallel*> models,
                                          const OptimizerConfig& config) {
  if (!models.empty() && models.front()->is_sharded())
    return std::make_unique<DistributedOptimizer>(std::move(models), config);
  return std::make_unique<Optimizer>(std::move(models), config);
}

}  // namespace lockstep
