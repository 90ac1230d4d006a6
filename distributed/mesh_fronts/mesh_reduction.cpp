#include "lockstep/distributed/mesh_reduction.h"

#include <algorithm>

#include "lockstep/core/check.h"
#include "lockstep/distributed/model_check.h"
#include "lockstep/parallel_state/axis_groups.h"

namespace lockstep {
namespace {

const RankGrids& grids_of(const MeshParameter& param) {
  return param.dtensor->device_mesh().parallel_state().grids();
}

/// The ranks over which the data-parallel reduction of a described parameter adds.
int64_t ranks_of_batch_axes(const MeshParameter& param) {
  return grids_of(param).size(replicas(*param.description));
}

}  // namespace

MeshAxis axis_named(const std::string& name, const ParamDescription& description) {
  for (const MeshAxis axis : description.axes())
    if (to_string(axis) == name) return axis;
  fail<UsageError>("found axis '{}', allowed: those of '{}'", name, description.to_string());
}

std::vector<std::string> reduced_axes(const MeshParameter& param) {
  std::vector<std::string> axes = axes_of(param).replicated;
  for (const std::string& complete : param.complete_axes) {
    const auto found = std::find(axes.begin(), axes.end(), complete);
    require<UsageError>(found != axes.end(),
                        "parameter '{}': complete on axis '{}', allowed: axes on which it is "
                        "replicated, each once",
                        param.name, complete);
    axes.erase(found);
  }
  return axes;
}

std::string complete_text(const MeshParameter& param) {
  if (param.complete_axes.empty()) return "";
  return fmt::format("['{}' on {}]", param.name, fmt::join(param.complete_axes, " and "));
}

ScalingFactor mesh_scaling(const MeshParameter& param, bool mean, int64_t ranks) {
  if (!param.description || !param.dtensor)
    return scaling_factor(mean ? GradientScalingMode::average : GradientScalingMode::per_token,
                          ranks, ranks);
  const RankGrids& grids = grids_of(param);
  int64_t divisor = mean ? grids.size(GroupKind::dp_cp) : 1;
  for (const MeshAxis axis : partial_axes(*param.description, grids))
    if (param.description->gradient_state(axis) == GradientState::partial_mean)
      divisor *= grids.size(group_kind_of(axis));
  return {1, divisor};
}

Placement placement_of_terms(const MeshParameter& param, const std::string& axis, bool mean) {
  const auto term_of = [](bool average) {
    return Partial{average ? ReduceOp::average : ReduceOp::sum};
  };
  if (!param.description) return term_of(mean);
  const MeshAxis described = axis_named(axis, *param.description);
  if (!splits_batch(described))
    return term_of(param.description->gradient_state(described) == GradientState::partial_mean);
  const int64_t divisor = grids_of(param).size(GroupKind::dp_cp);
  require<UsageError>(!mean || ranks_of_batch_axes(param) == divisor,
                      "grad: the gradient of '{}' is a sum over {} ranks that is divided by {}, "
                      "which no placement says; allowed: grad() after wait()",
                      param.name, ranks_of_batch_axes(param), divisor);
  return term_of(mean);
}

void refuse_described_without_mesh(const MeshParameter& param, const char* front) {
  if (!param.description || param.dtensor) return;
  const ParamDescription& description = *param.description;
  description.validate(param.name);
  bool is_plain = replicas(description) == GroupKind::dp_cp && !description.tie;
  for (const MeshAxis axis : model_axes(description))
    is_plain = is_plain && description.gradient_state(axis) == GradientState::complete &&
               description.placement(axis) == Placement(Replicate{});
  require<UsageError>(is_plain,
                      "{}: parameter '{}' is described as '{}', allowed in a list without a mesh: "
                      "dense ones that are replicated and complete over tp and pp; use "
                      "mesh_parameters(module, state)",
                      front, param.name, description.to_string());
}

void check_same_described(const MeshParameters& params) {
  std::vector<NamedParameter> described;
  for (const MeshParameter& param : params)
    if (param.dtensor && param.description)
      described.push_back({param.name, param.tensor, *param.description});
  if (!described.empty()) check_same_trained(described, *params.job());
}

}  // namespace lockstep
