#include "lockstep/models/layers/layer_context.h"

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

GroupKind group_that_cuts(MeshAxis axis) {
  switch (axis) {
    case MeshAxis::tp:
      return GroupKind::tp;
    case MeshAxis::etp:
      return GroupKind::expert_tp;
    case MeshAxis::ep:
      return GroupKind::ep;
    default:
      fail<UsageError>("a layer's parameter: found a cut over {}, allowed: tp, etp, ep",
                       to_string(axis));
  }
}

}  // namespace

ParamOrigin LayerContext::origin() const {
  return {.options = options, .seed = seed, .name = name, .place = [state = state](MeshAxis axis) {
            const ProcessGroup group = state.group(group_that_cuts(axis));
            return AxisPlace{group.rank(), group.size()};
          }};
}

}  // namespace lockstep
