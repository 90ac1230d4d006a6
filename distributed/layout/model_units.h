#pragma once

// Internal.

#include <cstdint>
#include <string_view>
#include <vector>

#include "lockstep/distributed/param_layout.h"

namespace lockstep {

/// The modules of a model, which determine its units.
struct ModuleTree {
  bool numbered = false;   ///< its parent has it under a number, like torch::nn::ModuleList does
  int64_t num_params = 0;  ///< of its own
  std::vector<ModuleTree> children;
};

/// The number of the unit of each parameter, in the order of the tree: a module's own, then those
/// of its children. A unit is what is gathered and freed together where parameters are sharded
/// (ddp.data_parallel_sharding_strategy = optim_grads_params).
///
/// A module is a list if all its children that hold parameters are numbered, as the layers of a
/// transformer are. Each child of a list is a unit. So is each child of any other module, unless
/// there is a list below it; then the list's children are units. A module's own parameters are also
/// a unit.
std::vector<int64_t> number_units(const ModuleTree& root);

/// `units` numbered anew from 0 on, in the same order, so that it does not matter which other units
/// are between them.
std::vector<int64_t> renumbered(std::vector<int64_t> units);

/// Parameters that share a buffer that has memory only while it is used.
struct UnitPiece {
  int64_t unit = 0;
  std::vector<int64_t> params;  ///< indices, ascending
};

/// Cuts parameters of one BufferKind into such buffers: by `units`, the unit number of each
/// parameter, with the last unit first; and each unit by options.bucket_size, as
/// compute_param_layout() does. Without `units` each bucket of compute_param_layout() is one piece.
/// Errors are those of compute_param_layout().
std::vector<UnitPiece> unit_pieces(const std::vector<LayoutParam>& params,
                                   const std::vector<int64_t>& units, const LayoutOptions& options);

/// Whether a module called `name` by its parent is a numbered one.
bool is_number(std::string_view name);

}  // namespace lockstep
