#pragma once

#include <cstdint>

#include "lockstep/core/config.h"
#include "lockstep/parallel_state/rank_grids.h"

/// The grids of ranks that a configuration asks for. Needs no libtorch.
namespace lockstep {

/// The sizes that `parallel` sets; the caller sets the number of ranks.
ParallelSizes parallel_sizes(const ParallelConfig& parallel);

/// The fewest ranks that both grids fill: the least common multiple of the products of their sizes.
/// UsageError if it does not fit into 64 bits.
int64_t fewest_ranks(const ParallelConfig& parallel);

/// The grids of `world_size` ranks. ConfigError names the fields of `parallel` that do not fit.
RankGrids config_grids(const ParallelConfig& parallel, int64_t world_size);

}  // namespace lockstep
