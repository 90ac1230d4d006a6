#include "lockstep/parallel_state/axis_groups.h"

#include <algorithm>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/parallel_axes.h"

namespace lockstep {
namespace {

/// The kinds of groups of one of the two grids.
struct GridKinds {
  MeshAxis tensor;
  GroupKind replicas;
  GroupKind instance_replicas;  ///< inside an optimizer instance
  GroupKind model;
};

constexpr GridKinds kDenseKinds = {MeshAxis::tp, GroupKind::dp_cp, GroupKind::intra_dp_cp,
                                   GroupKind::tp_pp};
constexpr GridKinds kExpertKinds = {MeshAxis::etp, GroupKind::expert_dp, GroupKind::intra_expert_dp,
                                    GroupKind::tp_ep_pp};

constexpr const char* kOtherShards =
    "order '{}': with {} optimizer instances ranks {} have the same shard of dense parameters, and "
    "ranks {} the same shard of experts; allowed: an order in which these are the same, such as "
    "tp-cp-ep-dp-pp";
constexpr const char* kOtherInstances =
    "order '{}': with {} optimizer instances ranks {} {} would be in several of them; allowed: an "
    "order in which they are in one, such as tp-cp-ep-dp-pp";

const GridKinds& grid_of(const ParamDescription& description) {
  return description.is_expert ? kExpertKinds : kDenseKinds;
}

}  // namespace

GroupKind group_kind_of(MeshAxis axis) {
  if (const auto kind = kind_along(axis)) return *kind;
  fail<UsageError>("axis {} has no kind of groups", to_string(axis));
}

MeshAxis tensor_axis(const ParamDescription& description) { return grid_of(description).tensor; }

std::vector<MeshAxis> batch_axes(const ParamDescription& description) {
  std::vector<MeshAxis> axes;
  for (const MeshAxis axis : description.axes())
    if (splits_batch(axis)) axes.push_back(axis);
  return axes;
}

std::vector<MeshAxis> model_axes(const ParamDescription& description) {
  std::vector<MeshAxis> axes;
  for (const MeshAxis axis : description.axes())
    if (!splits_batch(axis)) axes.push_back(axis);
  return axes;
}

std::vector<MeshAxis> partial_axes(const ParamDescription& description, const RankGrids& grids) {
  std::vector<MeshAxis> axes = model_axes(description);
  std::erase_if(axes, [&](MeshAxis axis) {
    return grids.size(group_kind_of(axis)) == 1 ||
           description.gradient_state(axis) == GradientState::complete;
  });
  return axes;
}

GroupKind replicas(const ParamDescription& description) { return grid_of(description).replicas; }

std::vector<GroupKind> kinds_that_reach_all_ranks() {
  std::vector<GroupKind> kinds = {kDenseKinds.replicas};
  for (const MeshAxis axis : model_axes({})) kinds.push_back(group_kind_of(axis));
  return kinds;
}

ReductionKinds reduction_group(const ParamDescription& description, const RankGrids& grids,
                               bool sharded) {
  if (!sharded || grids.sizes().optimizer_instances == 1) return {replicas(description)};
  return {grid_of(description).instance_replicas, GroupKind::inter_optimizer};
}

void check_optimizer_instances(const RankGrids& grids) {
  const int64_t instances = grids.sizes().optimizer_instances;
  if (instances == 1) return;
  const RankGroups all = grids.groups(GroupKind::dp_cp);
  const RankGroups across = grids.groups(GroupKind::inter_optimizer);
  const int64_t shards = all.size() / instances;
  for (int64_t group = 0; group < all.count(); ++group)
    for (int64_t shard = 0; shard < shards; ++shard) {
      RankList dense;
      for (int64_t i = 0; i < instances; ++i)
        dense.push_back(all.rank_at(group, i * shards + shard));
      const RankList used = across.group(*across.index_of(dense.front()));
      require<ConfigError>(
          std::is_permutation(dense.begin(), dense.end(), used.begin(), used.end()), kOtherShards,
          grids.sizes().order, instances, fmt::join(dense, ", "), fmt::join(used, ", "));
    }
  const RankGroups whole = grids.groups(GroupKind::intra_optimizer);
  for (const GroupKind kind : {GroupKind::intra_dp_cp, GroupKind::intra_expert_dp}) {
    const RankGroups parts = grids.groups(kind);
    for (int64_t group = 0; group < parts.count(); ++group) {
      const RankList ranks = parts.group(group);
      for (const int64_t rank : ranks)
        require<ConfigError>(whole.index_of(rank) == whole.index_of(ranks.front()), kOtherInstances,
                             grids.sizes().order, instances, to_string(kind),
                             fmt::join(ranks, ", "));
    }
  }
}

GroupKind model_ranks(const ParamDescription& description) { return grid_of(description).model; }

std::vector<GroupKind> norm_groups(const RankGrids& grids, int64_t rank, bool sharded) {
  if (sharded) return {GroupKind::intra_optimizer};
  if (grids.group_of(kDenseKinds.model, rank) == grids.group_of(kExpertKinds.model, rank))
    return {kDenseKinds.model};
  return {kDenseKinds.model, kExpertKinds.model};
}

GroupKind tie_group_kind(TiedStages stages) {
  switch (stages) {
    case TiedStages::first:
      return GroupKind::position_embedding;
    case TiedStages::first_and_last:
      return GroupKind::embedding;
    case TiedStages::all:
      return GroupKind::pp;
  }
  fail<UsageError>("unknown stages {}", static_cast<int>(stages));
}

bool is_first_holder(const ParamDescription& description, const RankGrids& grids, int64_t rank) {
  const auto is_first = [&](GroupKind kind) { return grids.groups(kind).position_of(rank) == 0; };
  for (const MeshAxis axis : model_axes(description)) {
    const bool has_copies = axis == MeshAxis::pp
                                ? description.is_on_all_stages()
                                : !std::holds_alternative<Shard>(description.placement(axis));
    if (has_copies && !is_first(group_kind_of(axis))) return false;
  }
  return !description.tie || is_first(tie_group_kind(description.tie->stages));
}

}  // namespace lockstep
