#pragma once

#include <cstdint>

#include "lockstep/core/config.h"
#include "lockstep/parallel_state/rank_grids.h"

/// The grids of ranks that a configuration asks for. Needs no libtorch.
namespace lockstep {

/// The sizes that `parallel` names; the number of ranks is left to the caller.
ParallelSizes parallel_sizes(const ParallelConfig& parallel);

/// The grids of `world_size` ranks. ConfigError names the fields of `parallel` that do not fit.
RankGrids config_grids(const ParallelConfig& parallel, int64_t world_size);

}  // namespace lockstep
