#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/parallel_state/mesh_layout.h"
#include "lockstep/parallel_state/parallel_state.h"

namespace lockstep {

/// Named axes over ranks of a job, seen from one rank. Calls are named as in PyTorch's DeviceMesh.
/// A handle: copies and slices share their state. The mesh connects no group until one is
/// requested; equal lists of ranks share one communicator, also with ParallelState's own groups.
///
/// A rank of the job may hold a mesh that does not contain it. It can then query names, sizes and
/// coordinates; everything else is a UsageError, as are an unknown axis and an axis named twice.
class DeviceMesh {
 public:
  /// Your own axes over the ranks rank_offset ... rank_offset + product(shape) - 1, the last axis
  /// varying fastest: DeviceMesh(state, {2, 4}, {"dp", "tp"}) has tp groups of consecutive ranks.
  /// ConfigError: see MeshLayout; ranks outside the world.
  DeviceMesh(ParallelState state, const std::vector<int64_t>& shape,
             const std::vector<std::string>& names, int64_t rank_offset = 0);

  /// The same over any ranks, listed in row-major order.
  DeviceMesh(ParallelState state, const std::vector<int64_t>& shape,
             const std::vector<std::string>& names, const RankList& ranks);

  /// The grids of `state`: see dense_mesh_layout() and expert_mesh_layout(). Axes are named like
  /// MeshAxis, from the slowest to the fastest.
  static DeviceMesh dense(const ParallelState& state);
  static DeviceMesh expert(const ParallelState& state);

  /// The arithmetic: names, shape, ranks, all groups.
  const MeshLayout& layout() const { return layout_; }
  const ParallelState& parallel_state() const;

  int64_t ndim() const { return layout_.ndim(); }
  std::vector<int64_t> shape() const { return layout_.shape(); }
  std::vector<std::string> mesh_dim_names() const { return layout_.names(); }
  /// Number of ranks, and size of one axis.
  int64_t size() const { return layout_.size(); }
  int64_t size(const std::string& axis) const { return layout_.size(axis); }

  /// This rank's coordinates, one for each axis; empty if it is not in the mesh.
  std::optional<std::vector<int64_t>> get_coordinate() const;
  /// This rank's coordinate on one axis.
  int64_t get_local_rank(const std::string& axis) const;

  /// The submesh along `axes` that contains this rank, with the axes in the given order. `axes` may
  /// include axes that flatten() has created from axes of this mesh.
  DeviceMesh slice(const std::vector<std::string>& axes) const;
  DeviceMesh operator[](const std::string& axis) const { return slice({axis}); }

  /// A mesh with one axis in place of all axes, and the ranks in the same order. For example,
  /// mesh.slice({"dp", "cp"}).flatten() has the axis "dp_cp", and from then on mesh["dp_cp"]
  /// returns it. UsageError: a name that an axis, or another selection of axes, already has.
  DeviceMesh flatten(std::string name = "") const;

  /// This rank's group along `axes`, or along all axes if none is named. The order of `axes` does
  /// not matter: the ranks of the group are in the order of the mesh. The first call connects the
  /// group, and all its members must make it.
  ProcessGroup get_group(const std::vector<std::string>& axes = {}) const;

  /// "dp=2 x tp=4"
  std::string to_string() const { return layout_.to_string(); }

  /// The same axes over the same ranks.
  bool operator==(const DeviceMesh& other) const { return layout_ == other.layout_; }

 private:
  struct Shared;
  DeviceMesh(ParallelState state, MeshLayout layout);
  DeviceMesh(std::shared_ptr<Shared> shared, MeshLayout layout);
  std::vector<int64_t> require_coordinate() const;

  std::shared_ptr<Shared> shared_;
  MeshLayout layout_;
};

}  // namespace lockstep
