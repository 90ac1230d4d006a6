#include "lockstep/planner/config_grids.h"

#include <array>
#include <string>
#include <vector>

#include "lockstep/core/check.h"
#include "lockstep/core/context_parallel_rules.h"
#include "lockstep/core/integers.h"

namespace lockstep {
namespace {

/// A size of `parallel`, with its field's name.
struct NamedSize {
  const char* field;
  int64_t size;
};

void require_divides(int64_t world_size, const std::array<NamedSize, 3>& sizes) {
  int64_t product = 1;
  std::vector<std::string> factors;
  for (const NamedSize& one : sizes) {
    product = checked_mul(product, one.size, one.field);
    factors.push_back(fmt::format("parallel.{} ({})", one.field, one.size));
  }
  require<ConfigError>(world_size % product == 0,
                       "{} = {}, allowed: a divisor of the number of ranks ({})",
                       fmt::join(factors, " x "), product, world_size);
}

void require_grids_fit(const ParallelConfig& parallel, int64_t world_size) {
  const int64_t tensor = parallel.tensor_model_parallel_size;
  const NamedSize pipeline = {"pipeline_model_parallel_size",
                              parallel.pipeline_model_parallel_size};
  require_divides(world_size, {{{"tensor_model_parallel_size", tensor},
                                pipeline,
                                {"context_parallel_size", parallel.context_parallel_size}}});
  require_divides(
      world_size,
      {{{"expert_tensor_parallel_size", parallel.expert_tensor_parallel_size.value_or(tensor)},
        pipeline,
        {"expert_model_parallel_size", parallel.expert_model_parallel_size}}});
}

}  // namespace

ParallelSizes parallel_sizes(const ParallelConfig& parallel) {
  return {.tensor = parallel.tensor_model_parallel_size,
          .pipeline = parallel.pipeline_model_parallel_size,
          .virtual_pipeline = parallel.virtual_pipeline_model_parallel_size,
          .context = parallel.context_parallel_size,
          .expert = parallel.expert_model_parallel_size,
          .expert_tensor = parallel.expert_tensor_parallel_size,
          .order = parallel.order,
          .optimizer_instances = parallel.num_distributed_optimizer_instances,
          .hierarchical_context = context_parallel_levels(parallel)};
}

RankGrids config_grids(const ParallelConfig& parallel, int64_t world_size) {
  require<ConfigError>(world_size >= 1, "world-size: found {}, allowed: >= 1", world_size);
  require_grids_fit(parallel, world_size);
  ParallelSizes sizes = parallel_sizes(parallel);
  sizes.world_size = world_size;
  try {
    return RankGrids(sizes);
  } catch (const ConfigError& error) {
    fail<ConfigError>("parallel.order = {}, parallel.num_distributed_optimizer_instances = {}: {}",
                      sizes.order, sizes.optimizer_instances, error.what());
  }
}

}  // namespace lockstep
