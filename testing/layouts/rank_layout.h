#pragma once

#include <cstdint>
#include <string>

#include "lockstep/parallel_state/rank_grids.h"

namespace lockstep::testing {

/// How a model is cut over some ranks:
///
///     {.ranks = 4, .sizes = {.tensor = 2}, .sequence_parallel = true}
struct RankLayout {
  int64_t ranks = 1;
  ParallelSizes sizes = {};  ///< world_size is filled in
  /// For ParallelContext: the ranks of tp split the sequence between the tensor-parallel regions.
  bool sequence_parallel = false;

  /// ConfigError as RankGrids, and for several model chunks per rank (sizes.virtual_pipeline).
  RankGrids grids() const;
};

/// "4 ranks, tp 2, sequence parallel, dp 2"
std::string to_string(const RankLayout& layout);

}  // namespace lockstep::testing
