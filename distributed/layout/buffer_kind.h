#pragma once

// Internal: which buffer a parameter is placed in, and how that buffer is laid out. Plain
// arithmetic, which the run and the planner share.

#include <compare>
#include <cstdint>
#include <vector>

#include "lockstep/core/config.h"
#include "lockstep/core/placement.h"
#include "lockstep/distributed/param_layout.h"
#include "lockstep/parallel_state/rank_grids.h"

namespace lockstep {

/// Parameters of one model share a buffer if this and their dtypes are the same.
struct BufferKind {
  GroupKind replicas = GroupKind::dp_cp;  ///< over which gradients are reduced first
  bool whole_matrices = false;            ///< see MatrixLayout::whole
  /// The axes over which the gradient is reduced later and whose ranks hold other parameters
  /// besides this one: always the stages of a pipeline, others if they lay out their buffers
  /// differently.
  std::vector<MeshAxis> apart = {};
  auto operator<=>(const BufferKind&) const = default;
};

/// `unlike`: the kinds of replicas() whose buffers the ranks of a later reduction lay out
/// differently.
BufferKind buffer_kind(const ParamDescription& description, const RankGrids& grids,
                       MatrixLayout matrices, const std::vector<GroupKind>& unlike = {});

/// Whether the parameter is one of the matrices that are kept whole.
bool lies_whole(const ParamDescription& description, MatrixLayout matrices);

/// Bytes of a gradient element for a parameter with `param_bytes` per element: 4 for 16-bit types
/// with `reduce_in_fp32` (ddp.grad_reduce_in_fp32).
int64_t grad_element_bytes(int64_t param_bytes, bool reduce_in_fp32);

/// Whether a model chunk's buffers are cut into buckets: only those of the first chunk of the first
/// pipeline stage. The reductions of the others are hidden by the backwards that follow.
bool has_buckets(int64_t stage, int64_t chunk);

/// `numel` elements in `shape`.
LayoutParam layout_param(const ParamDescription& description, const std::vector<int64_t>& shape,
                         int64_t numel);

/// How to lay out a buffer of `kind` that holds `numel` elements, including those of the parameter
/// that `description` describes. `bucketed`: see has_buckets(). With
/// ddp.data_parallel_sharding_strategy = optim_grads buffers are always cut; with
/// optim_grads_params `numel` elements are a unit, which is cut only if ddp.bucket_size is set.
LayoutOptions layout_options(const DistributedDataParallelConfig& config, const RankGrids& grids,
                             const BufferKind& kind, const ParamDescription& description,
                             int64_t numel, bool bucketed);

}  // namespace lockstep
