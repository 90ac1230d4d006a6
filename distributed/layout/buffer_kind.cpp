#include "lockstep/distributed/buffer_kind.h"

#include <algorithm>

#include "lockstep/parallel_state/axis_groups.h"

namespace lockstep {

BufferKind buffer_kind(const ParamDescription& description, const RankGrids& grids,
                       MatrixLayout matrices, const std::vector<GroupKind>& unlike) {
  BufferKind kind = {.replicas = replicas(description),
                     .whole_matrices = lies_whole(description, matrices)};
  const std::vector<MeshAxis> axes = partial_axes(description, grids);
  const bool over_stages = std::find(axes.begin(), axes.end(), MeshAxis::pp) != axes.end();
  const bool differs = std::find(unlike.begin(), unlike.end(), kind.replicas) != unlike.end();
  if (over_stages || differs) kind.apart = axes;
  return kind;
}

bool lies_whole(const ParamDescription& description, MatrixLayout matrices) {
  return matrices == MatrixLayout::whole && description.update == ParamUpdate::matrix;
}

int64_t grad_element_bytes(int64_t param_bytes, bool reduce_in_fp32) {
  return param_bytes == 2 && reduce_in_fp32 ? 4 : param_bytes;
}

bool has_buckets(int64_t stage, int64_t chunk) { return stage == 0 && chunk == 0; }

LayoutParam layout_param(const ParamDescription& description, const std::vector<int64_t>& shape,
                         int64_t numel) {
  const bool matrix = shape.size() >= 2 && numel > 0;
  return {.numel = numel,
          .shared_embedding = description.is_on_several_stages(),
          .rows = matrix ? numel / shape.back() : 0,
          .columns = matrix ? shape.back() : 0};
}

LayoutOptions layout_options(const DistributedDataParallelConfig& config, const RankGrids& grids,
                             const BufferKind& kind, const ParamDescription& description,
                             int64_t numel, bool bucketed) {
  const bool sharded = config.use_distributed_optimizer;
  LayoutOptions options = {
      .distributed_optimizer = sharded,
      .data_parallel_size = grids.size(reduction_group(description, grids, sharded).group),
      .pad_for_high_bus_bandwidth = config.pad_buckets_for_high_nccl_busbw,
      .whole_parameters = kind.whole_matrices};
  const ShardingStrategy strategy = config.data_parallel_sharding_strategy;
  if (strategy == ShardingStrategy::optim_grads_params)
    options.bucket_size = config.bucket_size;
  else if (bucketed || strategy == ShardingStrategy::optim_grads)
    options.bucket_size = effective_bucket_size(config, numel, grids.size(GroupKind::dp_cp));
  return options;
}

}  // namespace lockstep
