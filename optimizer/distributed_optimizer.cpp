#include "lockstep/optimizer/distributed_optimizer.h"

namespace lockstep {

Optimizer::StepResult DistributedOptimizer::step() {
  for (DistributedDataParallel* model : models()) model->finish_param_sync();
  const StepResult result = Optimizer::step();
  if (result.skipped) return result;
  for (DistributedDataParallel* model : models()) model->note_params_changed();
  for (DistributedDataParallel* model : models()) model->start_param_sync();
  return result;
}

std::unique_ptr<Optimizer> make_optimizer(std::vector<DistributedDataParallel*> models,
                                          const OptimizerConfig& config) {
  if (!models.empty() && models.front()->is_sharded())
    return std::make_unique<DistributedOptimizer>(std::move(models), config);
  return std::make_unique<Optimizer>(std::move(models), config);
}

}  // namespace lockstep
