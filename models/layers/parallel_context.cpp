#include "lockstep/models/parallel_context.h"

#include <algorithm>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/axis_groups.h"

namespace lockstep {

ParamOrigin ParallelContext::origin() const {
  return {.options = options,
          .seed = seed,
          .name = name,
          .place =
              [state = state](MeshAxis axis) {
                const bool cuts =
                    std::find(kCuttingAxes.begin(), kCuttingAxes.end(), axis) != kCuttingAxes.end();
                require<UsageError>(
                    cuts, "a layer's parameter: found a cut over {}, allowed: tp, etp, ep",
                    to_string(axis));
                const ProcessGroup group = state.group(group_kind_of(axis));
                return AxisPlace{group.rank(), group.size()};
              },
          .splits_sequence = sequence_parallel && state.grids().size(GroupKind::tp) > 1};
}

}  // namespace lockstep
