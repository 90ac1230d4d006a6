#include "lockstep/models/parallel_context.h"

#include <algorithm>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/axis_groups.h"

namespace lockstep {
namespace {

[[noreturn]] void refuse_cut_over(MeshAxis axis) {
  std::vector<const char*> names;
  for (const MeshAxis cutting : kCuttingAxes) names.push_back(to_string(cutting));
  fail<UsageError>("a layer's parameter: found a cut over {}, allowed: {}", to_string(axis),
                   fmt::join(names, ", "));
}

}  // namespace

ParamOrigin ParallelContext::origin() const {
  return {.options = options,
          .seed = seed,
          .name = name,
          .place =
              [state = state](MeshAxis axis) {
                const bool cuts =
                    std::find(kCuttingAxes.begin(), kCuttingAxes.end(), axis) != kCuttingAxes.end();
                if (!cuts) refuse_cut_over(axis);
                const ProcessGroup group = state.group(group_kind_of(axis));
                return AxisPlace{group.rank(), group.size()};
              },
          .splits_sequence = sequence_parallel && state.grids().size(GroupKind::tp) > 1,
          .perform_initialization = perform_initialization};
}

}  // namespace lockstep
