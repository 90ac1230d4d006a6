#include "lockstep/parallel_state/rank_grids.h"

#include <algorithm>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/parallel_axes.h"

namespace lockstep {
namespace {

void check_size(const char* name, int64_t size) {
  require<ConfigError>(size >= 1, "{}: found {}, allowed: >= 1", name, size);
}

/// The data-parallel axis gets the ranks that the others leave of the world.
GridSizes sizes_of(Grid grid, const ParallelSizes& s) {
  GridSizes sizes;
  std::vector<std::string> factors;
  for (const GridAxis& axis : grid_axes(grid)) {
    if (!axis.size) continue;
    const int64_t size = sizes.*axis.in_order->size = axis.size->of(s);
    check_size(axis.size->name, size);
    factors.push_back(fmt::format("{} ({})", axis.size->name, size));
  }
  require<ConfigError>(s.world_size >= 1, "world-size: found {}, allowed: >= 1", s.world_size);
  int64_t rest = s.world_size;
  for (const GridAxis& axis : grid_axes(grid)) {
    if (!axis.size) continue;
    const int64_t size = sizes.*axis.in_order->size;
    require<ConfigError>(rest % size == 0, "world-size ({}) is not divisible by {}", s.world_size,
                         fmt::join(factors, " x "));
    rest /= size;
  }
  sizes.dp = rest;
  return sizes;
}

/// Divides step by step, because a product of sizes may not fit.
void check_levels(const std::vector<int64_t>& levels, int64_t context) {
  if (levels.empty()) return;
  int64_t rest = context;
  for (const int64_t level : levels) {
    check_size("hierarchical-context", level);
    rest = rest % level == 0 ? rest / level : 0;
  }
  require<ConfigError>(rest == 1,
                       "hierarchical-context: found {}, allowed: sizes whose product is context "
                       "({})",
                       fmt::join(levels, ","), context);
}

}  // namespace

const std::vector<GroupKind>& all_group_kinds() {
  static const std::vector<GroupKind> kinds = [] {
    std::vector<GroupKind> all;
    for (const GroupRow& row : group_table()) all.push_back(row.kind);
    return all;
  }();
  return kinds;
}

const char* to_string(GroupKind kind) { return group_table()[static_cast<size_t>(kind)].name; }

RankGrids::RankGrids(const ParallelSizes& sizes)
    : sizes_(sizes),
      dense_sizes_(sizes_of(Grid::dense, sizes)),
      expert_sizes_(sizes_of(Grid::expert, sizes)),
      dense_(dense_sizes_, sizes.order),
      expert_(expert_sizes_, sizes.order) {
  check_size("virtual pipeline", sizes.virtual_pipeline.value_or(1));
  require<ConfigError>(!sizes.virtual_pipeline || sizes.pipeline > 1,
                       "virtual pipeline ({}): allowed with a pipeline of more than 1 stage, found "
                       "{}",
                       sizes.virtual_pipeline.value_or(0), sizes.pipeline);
  require<ConfigError>(dense_.groups("pp") == expert_.groups("pp"),
                       "order '{}': pp must come last, because the dense grid and the expert grid "
                       "would place the pipeline stages differently",
                       sizes.order);
  const int64_t instances = sizes.optimizer_instances;
  check_size("optimizer-instances", instances);
  const int64_t dp_cp = size(GroupKind::dp_cp);
  require<ConfigError>(dp_cp % instances == 0 && expert_sizes_.dp % instances == 0,
                       "optimizer-instances ({}) must divide the data-parallel ranks (dp x cp = "
                       "{}, expert dp = {})",
                       instances, dp_cp, expert_sizes_.dp);
  check_levels(sizes.hierarchical_context, sizes.context);
}

RankGroups RankGrids::groups(GroupKind kind) const {
  const int64_t instances = sizes_.optimizer_instances, pp = dense_sizes_.pp;
  const auto along_axes = [this](GroupKind of) {
    const GroupRow& row = group_table()[static_cast<size_t>(of)];
    return (row.grid == Grid::dense ? dense_ : expert_).groups(row.axes);
  };
  const auto sliced = [&](const GroupSet& set, bool inside) {
    return RankGroups(set, GroupSet({set.size() / instances, instances}, {inside, !inside}));
  };
  switch (kind) {
    case GroupKind::embedding:
      return RankGroups(along_axes(GroupKind::pp))
          .picked(std::min<int64_t>(pp, 2), std::max<int64_t>(pp - 1, 1));
    case GroupKind::position_embedding:
      return RankGroups(along_axes(GroupKind::pp)).picked(1, 1);
    case GroupKind::intra_dp_cp:
      return sliced(along_axes(GroupKind::dp_cp), true);
    case GroupKind::intra_expert_dp:
      return sliced(along_axes(GroupKind::expert_dp), true);
    case GroupKind::inter_optimizer:
      return instances == 1 ? RankGroups() : sliced(along_axes(GroupKind::expert_dp), false);
    case GroupKind::intra_optimizer:
      return RankGroups(along_axes(GroupKind::tp_ep_pp)).merged(expert_sizes_.dp / instances);
    default:
      return RankGroups(along_axes(kind));
  }
}

RankList RankGrids::group_of(GroupKind kind, int64_t rank) const {
  const RankGroups all = groups(kind);
  const auto index = all.index_of(rank);
  return index ? all.group(*index) : RankList{};
}

RankGroups RankGrids::context_level(size_t level) const {
  const std::vector<int64_t>& levels = sizes_.hierarchical_context;
  require<UsageError>(level < levels.size(), "context level {} of {}: no such level", level,
                      levels.size());
  std::vector<bool> mask(levels.size(), false);
  mask[level] = true;
  return {dense_.groups("cp"), GroupSet(levels, mask)};
}

}  // namespace lockstep
