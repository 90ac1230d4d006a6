#pragma once

// Internal: the axes over which gradients are reduced after the data-parallel reduction.

#include <vector>

#include "lockstep/core/placement.h"
#include "lockstep/parallel_state/rank_grids.h"

namespace lockstep {

/// The groups of tp, etp, ep or pp.
GroupKind group_kind_of(MeshAxis axis);

/// The axes that the data-parallel reduction does not cover: tp and pp, for experts etp, ep and pp.
std::vector<MeshAxis> remaining_axes(bool is_expert);

/// Those of them that have several ranks and over which the gradient is partial, in that order.
std::vector<MeshAxis> partial_axes(const ParamDescription& description, const RankGrids& grids);

}  // namespace lockstep
