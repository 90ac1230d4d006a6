#pragma once

// Internal: from the description of a parameter to groups of ranks. This is the only such table:
// code that sends something about a parameter finds the group here.

#include <array>
#include <optional>
#include <vector>

#include "lockstep/core/placement.h"
#include "lockstep/parallel_state/rank_grids.h"

namespace lockstep {

/// The groups whose ranks follow each other along `axis`: expert-tp for etp, expert-dp for edp, for
/// the others the kind with the name of the axis.
GroupKind group_kind_of(MeshAxis axis);

/// The axes that may cut a parameter, in the order in which they cut: tp, etp, ep.
inline constexpr std::array kCuttingAxes = {MeshAxis::tp, MeshAxis::etp, MeshAxis::ep};

/// The axes among them whose ranks may be in the same dp-cp group: etp, ep.
inline constexpr std::array kAxesInsideReplicas = {MeshAxis::etp, MeshAxis::ep};

/// The axis that cuts the matrices of a layer: tp, or etp for experts.
MeshAxis tensor_axis(const ParamDescription& description);

/// The axes that the data-parallel reduction sums over: cp and dp, or edp for experts.
std::vector<MeshAxis> batch_axes(const ParamDescription& description);

/// The remaining axes: tp and pp, or etp, ep and pp for experts. In the order in which gradients
/// are reduced over them.
std::vector<MeshAxis> model_axes(const ParamDescription& description);

/// The axes of model_axes() that have several ranks and over which the gradient is partial.
std::vector<MeshAxis> partial_axes(const ParamDescription& description, const RankGrids& grids);

/// The ranks that hold the same piece of the parameter: dp-cp, or expert-dp for experts. The first
/// of them broadcasts it when training begins.
GroupKind replicas(const ParamDescription& description);

/// Combining data over each of these kinds in turn combines it over all ranks: first over the
/// replicas of a dense parameter, then along its model_axes().
std::vector<GroupKind> kinds_that_reach_all_ranks();

/// The possible results of replicas(), in an order that is the same on all ranks: dp-cp, expert-dp.
inline constexpr std::array kReplicaKinds = {GroupKind::dp_cp, GroupKind::expert_dp};

/// The ranks over which the gradient of a parameter is reduced, and the parameter gathered.
struct ReductionKinds {
  GroupKind group;
  /// With several optimizer instances: the ranks over which their shards are then summed.
  std::optional<GroupKind> instances = {};
};

/// `sharded`: with the distributed optimizer. Returns replicas(), or the part of it inside an
/// instance if the optimizer has several.
ReductionKinds reduction_group(const ParamDescription& description, const RankGrids& grids,
                               bool sharded);

/// Dense parameters and experts share the groups of optimizer instances. ConfigError, naming order
/// and ranks, if the order of the axes gives them different instances, so that gradients of
/// different shards would be added. Takes time in proportion to the world.
void check_optimizer_instances(const RankGrids& grids);

/// The ranks that together hold one copy of all parameters of this parameter's kind: tp-pp, or
/// tp-ep-pp for experts. Norms are combined over them.
GroupKind model_ranks(const ParamDescription& description);

/// The kinds over which `rank` combines a norm, dense parameters first; a single kind if
/// model_ranks() are the same ranks for all parameters. `sharded`: over all ranks of an optimizer
/// instance.
std::vector<GroupKind> norm_groups(const RankGrids& grids, int64_t rank, bool sharded);

/// The ranks that hold the copies of a tied parameter.
GroupKind tie_group_kind(TiedStages stages);

/// Whether `rank` is the first of the ranks that hold the same piece of the parameter, leaving
/// replicas() aside: along tp, etp and ep if they do not cut it, and over the stages that have a
/// copy. Among the ranks of model_ranks() each element has one first holder, which counts it in a
/// norm.
bool is_first_holder(const ParamDescription& description, const RankGrids& grids, int64_t rank);

}  // namespace lockstep
