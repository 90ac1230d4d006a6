#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lockstep/parallel_state/device_mesh.h"
#include "lockstep/tests/distributed/drawn_params.h"

/// Meshes that are drawn from a seed, and the oracle's own arithmetic on them.
namespace lockstep::testing {

/// Axes over all ranks of a world; the last varies fastest.
struct DrawnMesh {
  std::vector<int64_t> sizes;
  std::vector<std::string> names;

  GridPlace place(int64_t rank) const {
    GridPlace place{sizes, std::vector<int64_t>(sizes.size())};
    for (size_t axis = sizes.size(); axis-- > 0; rank /= sizes[axis])
      place.coordinates[axis] = rank % sizes[axis];
    return place;
  }

  /// The ranks that `rank` reaches along the axes for which `along` returns true.
  template <class Along>
  RankList ranks_along(int64_t rank, Along along) const {
    RankList ranks;
    int64_t world = 1;
    for (const int64_t size : sizes) world *= size;
    const GridPlace own = place(rank);
    for (int64_t other = 0; other < world; ++other) {
      const GridPlace there = place(other);
      bool reached = true;
      for (size_t axis = 0; axis < sizes.size(); ++axis)
        reached = reached && (along(axis) || there.coordinates[axis] == own.coordinates[axis]);
      if (reached) ranks.push_back(other);
    }
    return ranks;
  }

  std::string text() const {
    std::string result;
    for (size_t i = 0; i < sizes.size(); ++i)
      result += (i == 0 ? "" : " x ") + names[i] + "=" + std::to_string(sizes[i]);
    return result;
  }
};

/// Draws one to `names.size()` axes with `world` ranks in total, under the first of `names`.
inline DrawnMesh draw_mesh(Draw& draw, int64_t world, const std::vector<std::string>& names) {
  DrawnMesh mesh;
  const int64_t axes = draw.between(1, static_cast<int64_t>(names.size()));
  for (int64_t i = 0; i < axes; ++i) {
    std::vector<int64_t> divisors;
    for (int64_t size = 1; size <= world; ++size)
      if (world % size == 0) divisors.push_back(size);
    mesh.sizes.push_back(i + 1 == axes ? world : draw.of(divisors));
    mesh.names.push_back(names[static_cast<size_t>(i)]);
    world /= mesh.sizes.back();
  }
  return mesh;
}

/// The placement of the weight on each axis.
inline std::vector<Placement> placements_of(const DrawnParam& param) {
  std::vector<Placement> placements;
  for (const AxisShare& share : param.axes) {
    if (share.role == AxisRole::cut)
      placements.emplace_back(Shard{share.dim});
    else
      placements.emplace_back(Replicate{});
  }
  return placements;
}

/// A leaf with the initial values of the part at `place`.
inline at::Tensor leaf_of(const DrawnParam& param, const GridPlace& place) {
  return initial_weight(param, place).to(param.dtype).clone().requires_grad_(param.trained);
}

}  // namespace lockstep::testing
