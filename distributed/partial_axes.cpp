#include "lockstep/distributed/partial_axes.h"

namespace lockstep {

GroupKind group_kind_of(MeshAxis axis) {
  switch (axis) {
    case MeshAxis::tp:
      return GroupKind::tp;
    case MeshAxis::etp:
      return GroupKind::expert_tp;
    case MeshAxis::ep:
      return GroupKind::ep;
    default:
      return GroupKind::pp;
  }
}

std::vector<MeshAxis> remaining_axes(bool is_expert) {
  using enum MeshAxis;
  return is_expert ? std::vector{etp, ep, pp} : std::vector{tp, pp};
}

std::vector<MeshAxis> partial_axes(const ParamDescription& description, const RankGrids& grids) {
  std::vector<MeshAxis> axes = remaining_axes(description.is_expert);
  std::erase_if(axes, [&](MeshAxis axis) {
    return grids.size(group_kind_of(axis)) == 1 ||
           description.gradient_state(axis) == GradientState::complete;
  });
  return axes;
}

}  // namespace lockstep
