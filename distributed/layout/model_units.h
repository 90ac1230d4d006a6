#pragma once

// Internal.

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep {

/// What the units of a model follow from: its modules, whatever they are called.
struct ModuleTree {
  std::string kind;        ///< the same for modules that are alike, such as those of one class
  int64_t num_params = 0;  ///< of its own
  std::vector<ModuleTree> children;
};

/// The number of the unit of each parameter, in the order of the tree: a module's own, then those of
/// its children. A unit is what is gathered and freed together where parameters are sharded
/// (ddp.data_parallel_sharding_strategy = optim_grads_params).
///
/// A module is a list if at least two of its children hold parameters and all that do are alike, as
/// the layers of a transformer are. Each child of a list is a unit. So is each child of another
/// module, unless there is a list below it, whose children are units then; and so are a module's own
/// parameters.
std::vector<int64_t> number_units(const ModuleTree& root);

}  // namespace lockstep
