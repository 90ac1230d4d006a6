#include "lockstep/parallel_state/shard_layout.h"

#include <algorithm>

#include "lockstep/core/check.h"
#include "lockstep/core/integers.h"

namespace lockstep {
namespace {

/// The axes left of `axis` that shard dimension `dim`.
std::vector<size_t> outer_cuts(const std::vector<Placement>& placements, size_t axis, int64_t dim) {
  std::vector<size_t> cuts;
  for (size_t i = 0; i < axis; ++i)
    if (placements[i] == Placement(Shard{dim})) cuts.push_back(i);
  return cuts;
}

/// The placement that `axis` can take while the axes to its left are still as in `from`.
Placement reachable(const std::vector<Placement>& from, const std::vector<Placement>& to,
                    size_t axis) {
  const auto* shard = std::get_if<Shard>(&to[axis]);
  if (!shard) return to[axis];
  const auto now = outer_cuts(from, axis, shard->dim);
  const auto later = outer_cuts(to, axis, shard->dim);
  if (now == later) return to[axis];
  const bool only_smaller = std::includes(later.begin(), later.end(), now.begin(), now.end());
  const bool can_wait = std::holds_alternative<Partial>(from[axis]) && only_smaller;
  return can_wait ? from[axis] : Placement(Replicate{});
}

}  // namespace

Chunk chunk_of(int64_t length, int64_t count, int64_t index) {
  const int64_t full = ceil_div(length, count);
  const int64_t start = std::min(length, full * index);
  return {start, std::min(full, length - start)};
}

std::vector<Placement> normalize_placements(std::vector<Placement> placements, int64_t tensor_dims,
                                            int64_t mesh_dims) {
  require<UsageError>(static_cast<int64_t>(placements.size()) == mesh_dims,
                      "placements {}: found {}, allowed: {}, one for each axis of the mesh",
                      to_string(placements), placements.size(), mesh_dims);
  const Partial* first = nullptr;
  const auto linear = [](const Partial& partial) {
    return partial.op == ReduceOp::sum || partial.op == ReduceOp::average;
  };
  for (Placement& placement : placements) {
    if (auto* shard = std::get_if<Shard>(&placement)) {
      require<UsageError>(shard->dim >= -tensor_dims && shard->dim < tensor_dims,
                          "{}: the tensor has {} dimensions, allowed: {} <= dim < {}",
                          to_string(placement), tensor_dims, -tensor_dims, tensor_dims);
      if (shard->dim < 0) shard->dim += tensor_dims;
    }
    const auto* partial = std::get_if<Partial>(&placement);
    if (!partial) continue;
    if (!first) first = partial;
    require<UsageError>(*first == *partial || (linear(*first) && linear(*partial)),
                        "placements {}: found two kinds of Partial, allowed: one, or sum with avg",
                        to_string(placements));
  }
  return placements;
}

LocalPart local_part(const std::vector<int64_t>& shape, const std::vector<int64_t>& mesh_shape,
                     const std::vector<int64_t>& coordinate,
                     const std::vector<Placement>& placements, size_t axes) {
  LocalPart part = {shape, std::vector<int64_t>(shape.size(), 0)};
  for (size_t axis = 0; axis < axes; ++axis) {
    const auto* shard = std::get_if<Shard>(&placements[axis]);
    if (!shard) continue;
    const auto dim = static_cast<size_t>(shard->dim);
    const Chunk chunk = chunk_of(part.shape[dim], mesh_shape[axis], coordinate[axis]);
    part.shape[dim] = chunk.size;
    part.offset[dim] = chunk.size > 0 ? part.offset[dim] + chunk.start : shape[dim];
  }
  return part;
}

std::vector<RedistributeStep> plan_redistribution(const std::vector<Placement>& from,
                                                  const std::vector<Placement>& to) {
  for (size_t axis = 0; axis < to.size(); ++axis)
    require<UsageError>(!std::holds_alternative<Partial>(to[axis]) || from[axis] == to[axis],
                        "placements {} cannot become {}: allowed targets of axis {} ({}) are "
                        "Replicate and Shard",
                        to_string(from), to_string(to), axis, to_string(from[axis]));
  std::vector<RedistributeStep> steps;
  std::vector<Placement> now = from;
  const auto change = [&](size_t axis, const Placement& target) {
    if (now[axis] == target) return;
    steps.push_back({axis, now[axis], target});
    now[axis] = target;
  };
  for (size_t axis = now.size(); axis-- > 0;) change(axis, reachable(now, to, axis));
  for (size_t axis = 0; axis < now.size(); ++axis) change(axis, to[axis]);
  return steps;
}

}  // namespace lockstep
