#pragma once

// Internal: from the description of a parameter to groups of ranks. The one table of it: whoever
// sends something about a parameter asks here over which group.

#include <array>
#include <optional>
#include <vector>

#include "lockstep/core/placement.h"
#include "lockstep/parallel_state/rank_grids.h"

namespace lockstep {

/// The groups whose ranks follow each other along `axis`: expert-tp for etp, expert-dp for edp, the
/// kind of the axis' own name for the others.
GroupKind group_kind_of(MeshAxis axis);

/// The axes that may cut a parameter, in the order in which they cut: tp, etp, ep.
inline constexpr std::array kCuttingAxes = {MeshAxis::tp, MeshAxis::etp, MeshAxis::ep};

/// Those of them whose ranks may lie in one group of dp-cp: etp, ep.
inline constexpr std::array kAxesInsideReplicas = {MeshAxis::etp, MeshAxis::ep};

/// The axis that cuts the matrices of a layer: tp, for experts etp.
MeshAxis tensor_axis(const ParamDescription& description);

/// The axes over whose ranks the data-parallel reduction adds: cp and dp, for experts edp.
std::vector<MeshAxis> batch_axes(const ParamDescription& description);

/// The axes that it leaves: tp and pp, for experts etp, ep and pp. In the order in which gradients
/// are reduced over them.
std::vector<MeshAxis> model_axes(const ParamDescription& description);

/// Those of model_axes() that have several ranks and over which the gradient is partial.
std::vector<MeshAxis> partial_axes(const ParamDescription& description, const RankGrids& grids);

/// The ranks that hold the same piece of the parameter: dp-cp, for experts expert-dp. The first of
/// them broadcasts it when training begins.
GroupKind replicas(const ParamDescription& description);

/// What is brought together over one of these kinds after the other has come from all ranks: the
/// replicas of a dense parameter, then along its model_axes().
std::vector<GroupKind> kinds_that_reach_all_ranks();

/// What replicas() can be, in an order that is the same on all ranks: dp-cp, expert-dp.
inline constexpr std::array kReplicaKinds = {GroupKind::dp_cp, GroupKind::expert_dp};

/// Over which ranks the gradient of a parameter is reduced, and the parameter gathered.
struct ReductionKinds {
  GroupKind group;
  /// With several optimizer instances: the ranks over which their shards are then added.
  std::optional<GroupKind> instances = {};
};

/// `sharded`: with the distributed optimizer. replicas(), and the part of it inside an instance
/// where the optimizer has several.
ReductionKinds reduction_group(const ParamDescription& description, const RankGrids& grids,
                               bool sharded);

/// The ranks that hold one copy of all parameters of this parameter's kind: tp-pp, for experts
/// tp-ep-pp. Norms are put together over them.
GroupKind model_ranks(const ParamDescription& description);

/// The kinds over which `rank` puts a norm together, dense parameters first: one where
/// model_ranks() are the same ranks for all parameters. `sharded`: over all ranks of an optimizer
/// instance.
std::vector<GroupKind> norm_groups(const RankGrids& grids, int64_t rank, bool sharded);

/// The ranks that hold the copies of a tied parameter.
GroupKind tie_group_kind(TiedStages stages);

/// Whether `rank` is the first of those that hold the same piece of the parameter, replicas()
/// aside: along tp, etp and ep where they do not cut it, and over the stages that have a copy. Over
/// the ranks of model_ranks() each element has one first holder, which counts it in a norm.
bool is_first_holder(const ParamDescription& description, const RankGrids& grids, int64_t rank);

}  // namespace lockstep
