#include "lockstep/planner/buffer_plan.h"

#include <map>

#include "lockstep/core/integers.h"

namespace lockstep {

std::vector<BufferPlan> chunk_buffers(const Config& config, const RankGrids& grids,
                                      const ModelChunk& chunk, int64_t stage, int64_t index,
                                      const UpdateStatement* rule) {
  const MatrixLayout matrices = matrix_layout(config.optimizer, rule);
  std::map<BufferKind, std::vector<ShapedParameter>> by_kind;
  for (ShapedParameter& param : chunk_parameters(config, chunk))
    if (param.trained)
      by_kind[buffer_kind(param.description, grids, matrices)].push_back(std::move(param));
  std::vector<BufferPlan> buffers;
  for (const auto& [kind, params] : by_kind) {
    BufferPlan& buffer = buffers.emplace_back();
    buffer.kind = kind;
    std::vector<LayoutParam> sizes;
    for (const ShapedParameter& param : params) {
      sizes.push_back(layout_param(param.description, param.shape, param.numel()));
      buffer.parameters = checked_add(buffer.parameters, param.numel(), "parameters");
    }
    buffer.options = layout_options(config.ddp, grids, kind, params.front().description,
                                    buffer.parameters, has_buckets(stage, index));
    buffer.layout = compute_param_layout(sizes, buffer.options);
  }
  return buffers;
}

}  // namespace lockstep
