#pragma once

#include <memory>

#include "lockstep/optimizer/optimizer.h"

namespace lockstep {

/// An Optimizer whose state is cut over the data-parallel ranks (ZeRO-1), for models wrapped with
/// ddp.use_distributed_optimizer. This rank holds master weights and moments of its shard alone,
/// updates that shard of the parameters in their buffer, and gets the others by all-gathers; see
/// DistributedDataParallel::update_params(). On the CPU a step that is skipped gathers nothing; on
/// CUDA it gathers what has not changed.
///
/// Bytes of a rank for a parameter element over d ranks, padding aside, parameters + gradients +
/// state: bf16 with fp32 gradients 2 + 4 + 12/d; fp32 4 + 4 + 8/d; fp64 8 + 8 + 16/d.
///
/// A step gives the bits that Optimizer gives on the same reduced gradients, apart from the
/// gradient norm, whose terms are added in another order.
class DistributedOptimizer final : public Optimizer {
 public:
  /// As Optimizer; UsageError for a model without ddp.use_distributed_optimizer.
  DistributedOptimizer(std::vector<DistributedDataParallel*> models, const OptimizerConfig& config,
                       const std::vector<ParamOverride>& overrides = {})
      : Optimizer(std::move(models), config, overrides, /*sharded=*/true) {}
};

/// The optimizer for models that are all wrapped with ddp.use_distributed_optimizer, or all
/// without.
std::unique_ptr<Optimizer> make_optimizer(std::vector<DistributedDataParallel*> models,
                                          const OptimizerConfig& config,
                                          const std::vector<ParamOverride>& overrides = {});

}  // namespace lockstep
