#pragma once

// Internal: the tables of the axes that cut a job. The grids, meshes, groups and their listing, the
// planner, the checkpoint's manifest and the command line read them, so that an axis is spelled out
// only here and where its size and its name are declared.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <variant>

#include "lockstep/core/config.h"
#include "lockstep/core/placement.h"
#include "lockstep/parallel_state/rank_grids.h"

namespace lockstep {

template <class Struct>
using SizeMember = std::variant<int64_t Struct::*, std::optional<int64_t> Struct::*>;

/// A size that the user of a job chooses.
struct ParallelSize {
  const char* name;     ///< "expert-tensor", an option of `lockstep plan groups`
  const char* meaning;  ///< for its --help; empty if it has no such option
  const char* field;    ///< of ParallelConfig: "expert_tensor_parallel_size"
  SizeMember<ParallelSizes> in_sizes;
  SizeMember<ParallelConfig> in_config;
  const ParallelSize* if_unset = nullptr;  ///< the size that it defaults to; null: 1

  /// The size; if it is not set, that of `if_unset`, or 1.
  int64_t of(const ParallelSizes& sizes) const;
  int64_t of(const ParallelConfig& config) const;
  /// This size, or `if_unset` if `config` does not set this one.
  const ParallelSize& source_in(const ParallelConfig& config) const;
  /// Sets it to the value in `config`; leaves it unset if `config` does.
  void copy(const ParallelConfig& config, ParallelSizes& sizes) const;
  void set(ParallelSizes& sizes, int64_t size) const;
  /// The name with `between` for "-": '_' makes it the key of the manifest, "expert_tensor".
  std::string name_with(char between) const;
};

/// All of them. The world and what is cut inside a group (instances of the optimizer, levels of
/// context) are not among them.
std::span<const ParallelSize* const> parallel_size_table();

/// An axis of GridSizes and its name in an order.
struct OrderAxis {
  const char* name;
  int64_t GridSizes::*size;
};

/// tp, cp, ep, dp, pp
std::span<const OrderAxis> order_axes();

/// The two grids over the same ranks.
enum class Grid { dense, expert };

/// One axis of a grid.
struct GridAxis {
  MeshAxis axis;
  const OrderAxis* in_order;  ///< "tp" for tp and etp
  const ParallelSize* size;   ///< null for dp and edp, which get the ranks that remain
};

/// The axes of a grid, in the order in which messages name their sizes.
std::span<const GridAxis> grid_axes(Grid grid);

/// The size of `axis` that a user chooses; null for dp and edp.
const ParallelSize* chosen_size(MeshAxis axis);

/// A kind of groups.
struct GroupRow {
  GroupKind kind;
  const char* name;  ///< "expert-tp"
  Grid grid;
  const char* axes;  ///< that its ranks lie along, as in an order; empty: made from another kind
};

/// All kinds, in the order of GroupKind.
std::span<const GroupRow> group_table();

/// The axis of the kind, if its ranks lie along a single axis.
std::optional<MeshAxis> only_axis(const GroupRow& row);

/// The kind whose ranks lie along `axis` alone, if there is one. This is a table look-up, because
/// every step asks many times.
std::optional<GroupKind> kind_along(MeshAxis axis);

}  // namespace lockstep
