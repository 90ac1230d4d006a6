#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/core/placement.h"

/// Which part of a tensor a rank of a mesh holds, and in which steps a tensor goes from one set of
/// placements to another: integer arithmetic without tensors. There is one placement for each axis
/// of the mesh. Axes that shard the same dimension cut it one after the other, the first axis
/// first; every cut is that of torch.chunk, so the last ranks may hold less, or nothing.
namespace lockstep {

/// A range of one dimension.
struct Chunk {
  int64_t start = 0;
  int64_t size = 0;
};

/// Chunk `index` of `length` elements in `count` chunks of ceil(length / count), the last ones
/// shorter or empty. An empty one starts at `length`.
Chunk chunk_of(int64_t length, int64_t count, int64_t index);

/// `placements` with negative dimensions counted from the end. UsageError: another number of
/// placements than `mesh_dims`, a dimension that a tensor of `tensor_dims` dimensions has not,
/// terms that are combined in two ways, unless those are sum and avg.
std::vector<Placement> normalize_placements(std::vector<Placement> placements, int64_t tensor_dims,
                                            int64_t mesh_dims);

/// The part of a tensor that one rank holds.
struct LocalPart {
  std::vector<int64_t> shape;
  std::vector<int64_t> offset;  ///< of its first element in the whole tensor; of nothing: the end
};

/// The part of a tensor of `shape` at `coordinate` of a mesh of `mesh_shape`, cut by the first
/// `axes` axes. All placements are normalized.
LocalPart local_part(const std::vector<int64_t>& shape, const std::vector<int64_t>& mesh_shape,
                     const std::vector<int64_t>& coordinate,
                     const std::vector<Placement>& placements, size_t axes);

/// One step: the placement of one axis changes, by at most one collective over its group.
struct RedistributeStep {
  size_t axis = 0;
  Placement from;
  Placement to;
};

/// The steps from `from` to `to`, the same on all ranks: from the last axis to the first, what must
/// go before an axis on its left can cut or join what it holds; then from the first to the last,
/// the rest. UsageError: Partial as target of an axis that is not Partial in that way already.
std::vector<RedistributeStep> plan_redistribution(const std::vector<Placement>& from,
                                                  const std::vector<Placement>& to);

}  // namespace lockstep
