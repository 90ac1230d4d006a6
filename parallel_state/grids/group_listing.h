#pragma once

#include <iosfwd>
#include <optional>

#include "lockstep/parallel_state/rank_grids.h"

/// The groups of a job as text, for `lockstep plan groups`.
namespace lockstep {

/// What to list for each kind of group.
struct GroupListing {
  std::optional<int64_t> rank = {};  ///< only the group that holds this rank
  bool summary = false;              ///< only the number of groups and their size
};

/// One JSON document, with a newline: "world_size", "order" and "sizes" (tp, cp, dp, pp, ep, etp,
/// edp), and under "groups" for each kind in the order of all_group_kinds(), then for cp-level-0,
/// cp-level-1, ...: all groups in their order, or the flat group of `rank` ([] if it is in none),
/// or {"count", "size"}. It is written while it is computed, so memory does not grow with the
/// world. ConfigError: a rank outside the world, or `rank` together with `summary`.
void write_groups_json(std::ostream& out, const RankGrids& grids, const GroupListing& listing);

/// The same for people: a line for each kind, groups separated by " | ".
void write_groups_text(std::ostream& out, const RankGrids& grids, const GroupListing& listing);

}  // namespace lockstep
