#include <algorithm>
#include <set>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/axis_groups.h"
#include "lockstep/testing/model_runs.h"
#include "lockstep/testing/param_pieces.h"

namespace lockstep::testing {
namespace {

Finding finding(const std::string& name, const std::string& axis, const std::string& text) {
  return {.pass = "parameters",
          .parameter = name,
          .axis = axis,
          .text = fmt::format("`{}`: {}", name, text)};
}

const NamedParameter* find(const std::vector<NamedParameter>& params, const std::string& name) {
  const auto found = std::find_if(params.begin(), params.end(),
                                  [&](const NamedParameter& param) { return param.name == name; });
  return found == params.end() ? nullptr : &*found;
}

/// The parameter of the single process from which `values` could come; empty if there is none.
std::string same_values(const RunRecord& reference, const at::Tensor& values) {
  for (const auto& [name, whole] : reference.own_initial)
    if (values.numel() > 1 && largest(values) > 0 && values.sizes() == whole.sizes() &&
        is_part(values, {whole}))
      return name;
  return "";
}

std::optional<Finding> unknown_name(const RunRecord& reference, const RunRecord& rank,
                                    const NamedParameter& param) {
  const std::string twin = same_values(reference, rank.own_initial.at(param.name));
  if (!twin.empty())
    return finding(param.name, "pp",
                   fmt::format("the model in one process has no parameter of this name, and this "
                               "one has the values of `{}`: it is a copy of it that is not tied; "
                               "give both one name, and set ParamDescription::tie",
                               twin));
  std::vector<std::string> names;
  for (const NamedParameter& known : reference.params) names.push_back(known.name);
  return finding(param.name, "",
                 fmt::format("the model in one process has no parameter of this name; it has: {}",
                             fmt::join(names, ", ")));
}

std::optional<Finding> wrong_shape(const NamedParameter& whole, const NamedParameter& param,
                                   const RankGrids& grids, int64_t rank) {
  const auto piece = piece_of(whole.tensor, param.description, grids, rank, rows_of(param));
  if (piece && piece->sizes() == param.tensor.sizes()) return {};
  const MeshAxis axis = tensor_axis(param.description);
  const auto fitting = placements_that_fit(whole.tensor, param, grids, rank, axis);
  const std::string name = lockstep::to_string(axis);
  return finding(
      param.name, name,
      fmt::format(
          "it is described as {} over {}, by which rank {} would hold {} of {}; it holds "
          "{}{}",
          lockstep::to_string(param.description.placement(axis)), name, rank,
          piece ? fmt::format("{}", fmt::join(piece->sizes(), " x ")) : "a piece",
          fmt::join(whole.tensor.sizes(), " x "), fmt::join(param.tensor.sizes(), " x "),
          fitting.empty() ? "" : fmt::format(", as {} would have it", fmt::join(fitting, ", "))));
}

}  // namespace

std::optional<Finding> wrong_parameter(const RunRecord& reference,
                                       const std::vector<RunRecord>& ranks,
                                       const RankLayout& layout) {
  const RankGrids grids = layout.grids();
  std::set<std::string> held;
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    for (const NamedParameter& param : ranks[rank].params) {
      held.insert(param.name);
      const NamedParameter* const whole = find(reference.params, param.name);
      if (!whole) return unknown_name(reference, ranks[rank], param);
      if (auto shape = wrong_shape(*whole, param, grids, static_cast<int64_t>(rank))) return shape;
    }
  for (const NamedParameter& param : reference.params)
    if (!held.contains(param.name))
      return finding(param.name, "", "no rank holds it, and the model in one process does");
  return {};
}

}  // namespace lockstep::testing
