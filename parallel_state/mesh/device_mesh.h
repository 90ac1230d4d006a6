#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/parallel_state/mesh_layout.h"
#include "lockstep/parallel_state/parallel_state.h"

namespace lockstep {

/// Named axes over ranks of a job, seen from one rank of it; calls are named as in PyTorch's
/// DeviceMesh. A handle: copies and slices share what they know of the job. Makes no group itself:
/// those that are asked for are connected then, and equal lists of ranks share one communicator,
/// also with ParallelState's own groups.
///
/// A rank of the job may hold a mesh that it is not in. Then it can ask for names, sizes and
/// coordinates; everything else is a UsageError, as are an unknown axis and an axis named twice.
class DeviceMesh {
 public:
  /// Axes of the caller's own over the ranks rank_offset ... rank_offset + product(shape) - 1, the
  /// last varying fastest: DeviceMesh(state, {2, 4}, {"dp", "tp"}) has tp groups of neighbours.
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

  /// The part of the mesh that this rank sees along `axes` alone, in the order given. Axes that
  /// flatten() made from axes of this mesh may be named too.
  DeviceMesh slice(const std::vector<std::string>& axes) const;
  DeviceMesh operator[](const std::string& axis) const { return slice({axis}); }

  /// One axis in place of all, with the ranks in the same order, as in
  /// mesh.slice({"dp", "cp"}).flatten(), whose axis is "dp_cp" and which mesh["dp_cp"] gives from
  /// then on. UsageError: a name that an axis, or another selection of axes, has already.
  DeviceMesh flatten(std::string name = "") const;

  /// This rank's group along `axes`, all of the mesh if none is named. Whichever order they are
  /// named in, the group is the same and its ranks are in the order of the mesh. Connected at the
  /// first call, which all its members must make.
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
