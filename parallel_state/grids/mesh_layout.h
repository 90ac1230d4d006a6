#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/parallel_state/rank_grids.h"

/// Ranks on named axes: the integer arithmetic of DeviceMesh.
namespace lockstep {

/// One axis of a mesh. An axis that joins several others counts through them like an odometer does.
struct MeshDimension {
  /// A step on a wheel of the odometer moves `stride` places in the list of ranks.
  struct Wheel {
    int64_t size = 1;
    int64_t stride = 1;
    bool operator==(const Wheel&) const = default;
  };

  std::string name;
  std::vector<Wheel> wheels;  ///< the last one turns fastest; wheels of size 1 are left out

  int64_t size() const;
  bool operator==(const MeshDimension&) const = default;
};

/// Ranks laid out on named axes. **The last axis varies fastest**, as in PyTorch's DeviceMesh:
/// MeshLayout({2, 4}, {"dp", "tp"}) has the ranks 0 ... 3 at dp = 0. Megatron Core's order strings
/// and its HyperCommGrid list the fastest axis first; dense_mesh_layout() and expert_mesh_layout()
/// reverse that.
///
/// Until the ranks are listed, it costs the same for any number of ranks, unless they are given as
/// a list.
///
/// An unknown axis, an axis named twice and a rank outside the mesh are a UsageError in every call.
class MeshLayout {
 public:
  /// The ranks rank_offset ... rank_offset + product(shape) - 1. ConfigError: the numbers of names
  /// and sizes differ, no name or an empty one, a name twice, a size below 1, a negative offset,
  /// ranks that do not fit into 64 bits.
  MeshLayout(const std::vector<int64_t>& shape, const std::vector<std::string>& names,
             int64_t rank_offset = 0);

  /// `ranks` in row-major order. ConfigError also for a list of the wrong length, a negative rank,
  /// or a rank listed twice.
  MeshLayout(const std::vector<int64_t>& shape, const std::vector<std::string>& names,
             const RankList& ranks);

  int64_t ndim() const { return static_cast<int64_t>(axes_.size()); }
  std::vector<std::string> names() const;
  std::vector<int64_t> shape() const;
  const std::vector<MeshDimension>& axes() const { return axes_; }
  /// Number of ranks, and size of one axis.
  int64_t size() const;
  int64_t size(const std::string& axis) const { return axes_[index_of(axis)].size(); }
  /// Position of `axis` among names().
  size_t index_of(const std::string& axis) const;

  /// All ranks in row-major order.
  RankList ranks() const;
  bool contains(int64_t rank) const { return coordinate(rank).has_value(); }
  /// One number for each axis. Empty if the mesh does not hold `rank`.
  std::optional<std::vector<int64_t>> coordinate(int64_t rank) const;

  /// A rank of the mesh that is `world` or larger, if there is one.
  std::optional<int64_t> rank_outside(int64_t world) const;

  /// The slice that `rank` reaches by moving only along `axes`: these axes, in the given order,
  /// over the ranks that share all other coordinates with it. `joined` are further axes that may be
  /// named, each created by flatten() from a slice of the same ranks; a slice cannot contain both
  /// such an axis and its parts.
  MeshLayout slice(const std::vector<std::string>& axes, int64_t rank,
                   const std::vector<MeshDimension>& joined = {}) const;

  /// One axis `name` in place of all axes; the ranks keep their order.
  MeshLayout flatten(const std::string& name) const;

  /// The ranks that `rank` reaches along `axes`. Whatever the order of `axes`, the ranks are listed
  /// in mesh order, so that each combination of axes is one group.
  RankList group(const std::vector<std::string>& axes, int64_t rank) const;
  /// All groups along `axes`, in the order of the other coordinates.
  std::vector<RankList> groups(const std::vector<std::string>& axes) const;

  /// "dp=2 x tp=4"
  std::string to_string() const;

  bool operator==(const MeshLayout& other) const;

 private:
  /// A list of ranks, and the place of each in it.
  struct RankTable;

  std::optional<int64_t> place_of(int64_t rank) const;
  int64_t rank_of(int64_t place) const;
  std::vector<std::string> in_mesh_order(const std::vector<std::string>& axes) const;
  void require_axis(bool known, const std::string& axis) const;

  std::vector<MeshDimension> axes_;
  int64_t first_place_ = 0;  ///< the place where all coordinates are 0
  int64_t rank_offset_ = 0;  ///< of place 0, if there is no table
  std::shared_ptr<const RankTable> table_;
};

/// The mesh of dense layers: axes tp, cp, dp, pp (names of MeshAxis), slowest first, so pp, dp, cp,
/// tp for the default order. Its groups are those of RankGrids.
MeshLayout dense_mesh_layout(const RankGrids& grids);

/// The mesh of experts over the same ranks: axes etp, ep, edp, pp.
MeshLayout expert_mesh_layout(const RankGrids& grids);

}  // namespace lockstep
