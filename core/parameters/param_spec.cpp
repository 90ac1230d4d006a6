#include "lockstep/core/param_spec.h"

#include <algorithm>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

template <class Item>
const Item* find_named(const std::vector<Item>& items, std::string_view name) {
  const auto found =
      std::find_if(items.begin(), items.end(), [&](const Item& item) { return item.name == name; });
  return found == items.end() ? nullptr : &*found;
}

template <class Item>
const Item& require_named(const std::vector<Item>& items, std::string_view name, const char* what,
                          const std::string& module) {
  if (const Item* found = find_named(items, name)) return *found;
  std::vector<std::string_view> names;
  for (const Item& item : items) names.push_back(item.name);
  fail<UsageError>("module '{}': found no {} '{}' in its specification, allowed: {}", module, what,
                   name, names.empty() ? "none" : fmt::format("{}", fmt::join(names, ", ")));
}

void collect_specs(const ModuleSpec& module, const std::string& prefix,
                   std::vector<ParamSpec>& out) {
  for (const ParamSpec& param : module.params) {
    out.push_back(param);
    out.back().name = prefix + param.name;
  }
  for (const ModuleSpec& child : module.children)
    collect_specs(child, prefix + child.name + ".", out);
}

/// A negative dimension counts from the last one.
size_t dimension_of(const ParamSpec& spec, const Shard& shard, MeshAxis axis) {
  const auto dims = static_cast<int64_t>(spec.shape.size());
  require<UsageError>(shard.dim >= -dims && shard.dim < dims,
                      "parameter '{}': found Shard({}) over {}, allowed: one of its {} dimensions",
                      spec.name, shard.dim, to_string(axis), dims);
  return static_cast<size_t>(shard.dim < 0 ? shard.dim + dims : shard.dim);
}

}  // namespace

LocalPiece local_piece(const ParamSpec& spec, const MeshPlace& place) {
  LocalPiece piece = {spec.shape, std::vector<int64_t>(spec.shape.size(), 0)};
  if (!place) return piece;
  for (const auto& [axis, placement] : spec.description.placements) {
    const auto* shard = std::get_if<Shard>(&placement);
    if (shard == nullptr) continue;
    const size_t dim = dimension_of(spec, *shard, axis);
    const AxisPlace at = place(axis);
    require<UsageError>(piece.shape[dim] % at.size == 0,
                        "parameter '{}': dimension {} has size {}, allowed: a multiple of the {} "
                        "ranks of {}",
                        spec.name, dim, piece.shape[dim], at.size, to_string(axis));
    piece.shape[dim] /= at.size;
    piece.offset[dim] += piece.shape[dim] * at.index;
  }
  return piece;
}

void ModuleSpec::add_child(std::string child_name, ModuleSpec child) {
  child.name = std::move(child_name);
  children.push_back(std::move(child));
}

const ParamSpec* ModuleSpec::find(std::string_view param) const {
  return find_named(params, param);
}

const ParamSpec& ModuleSpec::at(std::string_view param) const {
  return require_named(params, param, "parameter", name);
}

const ModuleSpec& ModuleSpec::child(std::string_view child_name) const {
  return require_named(children, child_name, "child", name);
}

std::vector<ParamSpec> ModuleSpec::all(const std::string& prefix) const {
  std::vector<ParamSpec> params_below;
  collect_specs(*this, prefix, params_below);
  return params_below;
}

}  // namespace lockstep
