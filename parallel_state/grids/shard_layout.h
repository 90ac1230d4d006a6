#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/core/placement.h"

/// Which part of a tensor a rank of a mesh holds, and the steps that take a tensor from one set of
/// placements to another: integer arithmetic without tensors. There is one placement for each axis
/// of the mesh. Axes that shard the same dimension cut it one after the other, the first axis
/// first; every cut is that of torch.chunk, so the last ranks may hold less, or nothing.
namespace lockstep {

/// A range of one dimension.
struct Chunk {
  int64_t start = 0;
  int64_t size = 0;
};

/// Chunk `index` of `length` elements, cut into `count` chunks of ceil(length / count); the last
/// ones may be shorter or empty. An empty one starts at `length`.
Chunk chunk_of(int64_t length, int64_t count, int64_t index);

/// `placements` with negative dimensions counted from the end. UsageError: the number of placements
/// is not `mesh_dims`; a dimension that a tensor of `tensor_dims` dimensions does not have;
/// different kinds of Partial, other than sum with avg.
std::vector<Placement> normalize_placements(std::vector<Placement> placements, int64_t tensor_dims,
                                            int64_t mesh_dims);

/// The part of a tensor that one rank holds.
struct LocalPart {
  std::vector<int64_t> shape;
  std::vector<int64_t> offset;  ///< of its first element in the whole tensor; if empty: the end
};

/// The part of a tensor of `shape` at `coordinate` of a mesh of `mesh_shape`, cut by the first
/// `axes` axes. All placements are normalized.
LocalPart local_part(const std::vector<int64_t>& shape, const std::vector<int64_t>& mesh_shape,
                     const std::vector<int64_t>& coordinate,
                     const std::vector<Placement>& placements, size_t axes);

/// One step: the placement of one axis changes, with at most one collective over its group.
struct RedistributeStep {
  size_t axis = 0;
  Placement from;
  Placement to;
};

/// The steps from `from` to `to`, the same on all ranks: from the last axis to the first, the
/// placements that must be undone before an axis to the left can cut or join the dimension; then
/// from the first to the last, the rest. UsageError: Partial as the target of an axis that does not
/// already have the same Partial.
std::vector<RedistributeStep> plan_redistribution(const std::vector<Placement>& from,
                                                  const std::vector<Placement>& to);

}  // namespace lockstep
