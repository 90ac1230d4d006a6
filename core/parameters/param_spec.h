#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "lockstep/core/placement.h"

/// Parameters as data: what a layer declares before any rank creates its piece. The layer, which
/// creates the parameter, and the planner, which never does, read the same declaration. Nothing
/// here needs libtorch.
namespace lockstep {

/// Every element starts at `value`.
struct ConstantValue {
  double value = 0;
  bool operator==(const ConstantValue&) const = default;
};

/// Normal values around 0, a function of the seed, the parameter's global name and the element's
/// global index alone: see fill_normal().
struct NormalValues {
  double standard_deviation = 0;
  bool operator==(const NormalValues&) const = default;
};

using InitialValues = std::variant<ConstantValue, NormalValues>;

/// One parameter of the whole model.
struct ParamSpec {
  std::string name;  ///< within its module, "weight"; the dotted one from ModuleSpec::all()
  std::vector<int64_t> shape;  ///< over all ranks, padding included
  InitialValues values;        ///< rows of padding (description.unpadded_rows) start at 0
  ParamDescription description;
};

/// A rank on one axis of the mesh: number `index` of `size`.
struct AxisPlace {
  int64_t index = 0;
  int64_t size = 1;
};

/// Where one rank is placed. Asked only for the axes over which a parameter is cut.
using MeshPlace = std::function<AxisPlace(MeshAxis)>;

/// What one rank holds of a parameter: a block of `shape` that starts at `offset` (elements, one
/// per dimension) of the whole.
struct LocalPiece {
  std::vector<int64_t> shape;
  std::vector<int64_t> offset;
  bool operator==(const LocalPiece&) const = default;
};

/// The piece of the rank at `place`; the whole if `place` is empty. If two axes cut one dimension,
/// the axis that comes first in MeshAxis cuts first. UsageError, naming the parameter: a dimension
/// that does not exist, or one that is not divisible by the number of ranks.
LocalPiece local_piece(const ParamSpec& spec, const MeshPlace& place);

/// What a module and the modules below it hold, in the order in which they register it.
struct ModuleSpec {
  std::string name = {};  ///< name in the parent; empty for the root
  std::vector<ParamSpec> params = {};
  std::vector<ModuleSpec> children = {};

  void add(ParamSpec param) { params.push_back(std::move(param)); }
  /// Adds `child` under `child_name`.
  void add_child(std::string child_name, ModuleSpec child);

  /// nullptr if the module has no such parameter.
  const ParamSpec* find(std::string_view param) const;
  /// UsageError, listing the names that exist, if the module has no such parameter or child.
  const ParamSpec& at(std::string_view param) const;
  const ModuleSpec& child(std::string_view child_name) const;

  /// All parameters under their dotted names, in the order of collect_parameters(). `prefix` goes
  /// in front of each name and ends in "." or is empty.
  std::vector<ParamSpec> all(const std::string& prefix = {}) const;
};

}  // namespace lockstep
