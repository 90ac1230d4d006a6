#pragma once

#include <utility>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/core/parameters.h"
#include "lockstep/parallel_state/parallel_state.h"

namespace lockstep::testing {

/// The part that this rank holds by the description of `param`. `whole`: the whole parameter, or a
/// tensor of its shape.
inline at::Tensor part_on(at::Tensor whole, const NamedParameter& param,
                          const ParallelState& state) {
  const std::vector<std::pair<MeshAxis, GroupKind>> axes = {{MeshAxis::tp, GroupKind::tp},
                                                            {MeshAxis::etp, GroupKind::expert_tp},
                                                            {MeshAxis::ep, GroupKind::ep}};
  for (const auto& [axis, kind] : axes) {
    const Placement placement = param.description.placement(axis);
    const auto* const shard = std::get_if<Shard>(&placement);
    if (shard == nullptr) continue;
    const ProcessGroup group = state.group(kind);
    whole = whole.chunk(group.size(), shard->dim)[static_cast<size_t>(group.rank())];
  }
  return whole;
}

}  // namespace lockstep::testing
