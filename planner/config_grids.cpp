#include "lockstep/planner/config_grids.h"

#include <numeric>
#include <string>
#include <vector>

#include "lockstep/core/check.h"
#include "lockstep/core/context_parallel_rules.h"
#include "lockstep/core/integers.h"
#include "lockstep/parallel_state/parallel_axes.h"

namespace lockstep {
namespace {

/// The product of the sizes that `parallel` gives the axes of `grid`.
int64_t ranks_of_a_replica(const ParallelConfig& parallel, Grid grid) {
  int64_t product = 1;
  for (const GridAxis& axis : grid_axes(grid))
    if (axis.size) product = checked_mul(product, axis.size->of(parallel), axis.size->field);
  return product;
}

void require_grid_fits(const ParallelConfig& parallel, Grid grid, int64_t world_size) {
  std::vector<std::string> factors;
  for (const GridAxis& axis : grid_axes(grid))
    if (axis.size)
      factors.push_back(fmt::format("parallel.{} ({})", axis.size->source_in(parallel).field,
                                    axis.size->of(parallel)));
  const int64_t product = ranks_of_a_replica(parallel, grid);
  require<ConfigError>(world_size % product == 0,
                       "{} = {}, allowed: a divisor of the number of ranks ({})",
                       fmt::join(factors, " x "), product, world_size);
}

}  // namespace

int64_t fewest_ranks(const ParallelConfig& parallel) {
  const int64_t dense = ranks_of_a_replica(parallel, Grid::dense);
  const int64_t expert = ranks_of_a_replica(parallel, Grid::expert);
  return checked_mul(dense / std::gcd(dense, expert), expert, "ranks");
}

ParallelSizes parallel_sizes(const ParallelConfig& parallel) {
  ParallelSizes sizes = {.order = parallel.order,
                         .optimizer_instances = parallel.num_distributed_optimizer_instances,
                         .hierarchical_context = context_parallel_levels(parallel)};
  for (const ParallelSize* size : parallel_size_table()) size->copy(parallel, sizes);
  return sizes;
}

RankGrids config_grids(const ParallelConfig& parallel, int64_t world_size) {
  require<ConfigError>(world_size >= 1, "world-size: found {}, allowed: >= 1", world_size);
  for (const Grid grid : {Grid::dense, Grid::expert}) require_grid_fits(parallel, grid, world_size);
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
