#include "lockstep/planner/buffer_plan.h"

#include <map>
#include <numeric>

#include "lockstep/core/integers.h"
#include "lockstep/distributed/model_units.h"
#include "lockstep/parallel_state/axis_groups.h"

namespace lockstep {
namespace {

/// The plan that the buffers of one kind share.
struct KindPlan {
  BufferKind kind;
  LayoutOptions options;
  std::vector<LayoutParam> sizes;
  std::vector<int64_t> units;
};

std::vector<UnitPiece> pieces_of(const KindPlan& plan, ShardingStrategy strategy) {
  const bool shards_params = strategy == ShardingStrategy::optim_grads_params;
  if (shards_params || strategy == ShardingStrategy::optim_grads)
    return unit_pieces(plan.sizes, shards_params ? plan.units : std::vector<int64_t>(),
                       plan.options);
  std::vector<UnitPiece> whole(1);
  whole[0].params.resize(plan.sizes.size());
  std::iota(whole[0].params.begin(), whole[0].params.end(), 0);
  return whole;
}

KindPlan kind_plan(const Config& config, const RankGrids& grids, const BufferKind& kind,
                   const std::vector<ShapedParameter>& params, const std::vector<size_t>& members,
                   bool bucketed) {
  KindPlan plan;
  plan.kind = kind;
  int64_t numel = 0;
  for (const size_t index : members) {
    const ShapedParameter& param = params[index];
    plan.sizes.push_back(layout_param(param.description, param.shape, param.numel()));
    plan.units.push_back(param.unit);
    numel = checked_add(numel, param.numel(), "parameters");
  }
  plan.options =
      layout_options(config.ddp, grids, kind, params[members.front()].description, numel, bucketed);
  return plan;
}

}  // namespace

std::vector<PlannedBuffer> chunk_buffers(const Config& config, const RankGrids& grids,
                                         const ModelChunk& chunk, int64_t stage, int64_t index,
                                         const UpdateStatement* rule) {
  const ShardingStrategy strategy = config.ddp.data_parallel_sharding_strategy;
  const bool shards_params = strategy == ShardingStrategy::optim_grads_params;
  const bool shards_grads = shards_params || strategy == ShardingStrategy::optim_grads;
  const MatrixLayout matrices = matrix_layout(config.optimizer, rule);
  const std::vector<ShapedParameter> params = chunk_parameters(config, chunk);
  std::map<BufferKind, std::vector<size_t>> by_kind;
  for (size_t i = 0; i < params.size(); ++i)
    if (params[i].trained)
      by_kind[buffer_kind(params[i].description, grids, matrices)].push_back(i);
  std::vector<PlannedBuffer> buffers;
  for (const auto& [kind, members] : by_kind) {
    const KindPlan plan =
        kind_plan(config, grids, kind, params, members, has_buckets(stage, index));
    const bool lends = shards_grads && plan.options.data_parallel_size > 1;
    for (const UnitPiece& piece : pieces_of(plan, strategy)) {
      PlannedBuffer& buffer = buffers.emplace_back();
      buffer.kind = kind;
      buffer.group = reduction_group(params[members.front()].description, grids,
                                     config.ddp.use_distributed_optimizer)
                         .group;
      buffer.options = plan.options;
      if (shards_grads) buffer.options.bucket_size.reset();
      buffer.unit = piece.unit;
      buffer.position = members[static_cast<size_t>(piece.params.front())];
      buffer.lends_grads = lends;
      buffer.lends_params = lends && shards_params;
      std::vector<LayoutParam> own;
      for (const int64_t param : piece.params) {
        own.push_back(plan.sizes[static_cast<size_t>(param)]);
        buffer.parameters = checked_add(
            buffer.parameters, params[members[static_cast<size_t>(param)]].numel(), "parameters");
      }
      buffer.layout = compute_param_layout(own, buffer.options);
    }
  }
  return buffers;
}

}  // namespace lockstep
