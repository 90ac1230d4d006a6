#include "lockstep/distributed/mesh_parameters.h"

#include <algorithm>
#include <set>

#include "lockstep/core/check.h"
#include "lockstep/core/parameters.h"
#include "lockstep/distributed/description_check.h"
#include "lockstep/distributed/mesh_reduction.h"
#include "lockstep/distributed/notify_on_error.h"

namespace lockstep {
namespace {

template <class Tensors>
std::vector<MeshParameter> without_names(const Tensors& tensors) {
  return std::vector<MeshParameter>(tensors.begin(), tensors.end());
}

std::vector<MeshParameter> parameters_of(const torch::nn::Module& module) {
  std::vector<MeshParameter> result;
  for (NamedParameter& parameter : collect_parameters(module)) {
    result.emplace_back(std::move(parameter.tensor), std::move(parameter.name));
    result.back().description = std::move(parameter.description);
  }
  return result;
}

/// The axes of `grid` for which `description` says where a parameter lies. If etp and ep cut the
/// same dimension, etp comes first, because it cuts first.
std::vector<std::string> axes_in(const DeviceMesh& grid, const ParamDescription& description) {
  std::vector<std::string> axes = grid.mesh_dim_names();
  if (!description.is_on_all_stages()) std::erase(axes, to_string(MeshAxis::pp));
  const auto etp = std::find(axes.begin(), axes.end(), to_string(MeshAxis::etp));
  const auto ep = std::find(axes.begin(), axes.end(), to_string(MeshAxis::ep));
  if (ep < etp && description.placement(MeshAxis::etp) == description.placement(MeshAxis::ep) &&
      description.placement(MeshAxis::ep) != Placement(Replicate{}))
    std::iter_swap(etp, ep);
  return axes;
}

MeshParameter on_mesh(NamedParameter parameter, const DeviceMesh& grid) {
  const ParamDescription& description = parameter.description;
  std::vector<Placement> placements;
  std::vector<std::string> complete;
  const DeviceMesh mesh = grid.slice(axes_in(grid, description));
  for (const std::string& name : mesh.mesh_dim_names()) {
    const MeshAxis axis = axis_named(name, description);
    placements.push_back(description.placement(axis));
    if (placements.back() == Placement(Replicate{}) &&
        description.gradient_state(axis) == GradientState::complete)
      complete.push_back(name);
  }
  MeshParameter result(DTensor::from_local(parameter.tensor, mesh, std::move(placements)),
                       std::move(parameter.name), std::move(complete));
  result.description = std::move(parameter.description);
  return result;
}

}  // namespace

MeshParameters::MeshParameters(std::vector<MeshParameter> parameters) {
  std::set<const c10::TensorImpl*> seen;
  for (size_t i = 0; i < parameters.size(); ++i) {
    MeshParameter& parameter = parameters[i];
    if (!parameter.tensor.defined()) {
      if (fault_.empty())
        fault_ = fmt::format("parameter {}{}: the tensor is undefined", i,
                             parameter.name.empty() ? "" : fmt::format(" ('{}')", parameter.name));
      continue;
    }
    if (!seen.insert(parameter.tensor.unsafeGetTensorImpl()).second) continue;
    if (parameter.name.empty()) parameter.name = fmt::format("parameter {}", i);
    parameters_.push_back(std::move(parameter));
  }
}

MeshParameters::MeshParameters(const std::vector<at::Tensor>& tensors)
    : MeshParameters(without_names(tensors)) {}

MeshParameters::MeshParameters(const std::vector<DTensor>& tensors)
    : MeshParameters(without_names(tensors)) {}

MeshParameters::MeshParameters(const torch::nn::Module& module)
    : MeshParameters(parameters_of(module)) {}

void MeshParameters::check() const { require<UsageError>(fault_.empty(), "{}", fault_); }

const ParallelState* MeshParameters::job() const {
  for (const MeshParameter& parameter : parameters_)
    if (parameter.dtensor) return &parameter.dtensor->device_mesh().parallel_state();
  return nullptr;
}

MeshParameters mesh_parameters(const torch::nn::Module& module, const ParallelState& state) {
  return notify_on_error(state, [&] {
    std::vector<NamedParameter> parameters = collect_parameters(module);
    refuse_other_cuts(parameters, state.grids(), "mesh_parameters");
    refuse_ties(parameters, state.grids(), "mesh_parameters");
    const DeviceMesh dense = DeviceMesh::dense(state), expert = DeviceMesh::expert(state);
    std::vector<MeshParameter> result;
    for (NamedParameter& parameter : parameters) {
      parameter.description.validate(parameter.name);
      if (parameter.tensor.requires_grad()) require_partial_sums(parameter, state.grids());
      const bool on_dense = parameter.description.lives_on(MeshAxis::dp);
      result.push_back(on_mesh(std::move(parameter), on_dense ? dense : expert));
    }
    return MeshParameters(std::move(result));
  });
}

ParameterAxes axes_of(const MeshParameter& parameter) {
  ParameterAxes axes;
  if (!parameter.dtensor) return axes;
  const std::vector<std::string> names = parameter.dtensor->device_mesh().mesh_dim_names();
  for (size_t i = 0; i < names.size(); ++i) {
    const Placement& placement = parameter.dtensor->placements()[i];
    require<UsageError>(!std::holds_alternative<Partial>(placement),
                        "parameter '{}': found {} on axis '{}', allowed: Replicate, Shard",
                        parameter.name, to_string(placement), names[i]);
    (std::holds_alternative<Shard>(placement) ? axes.sharded : axes.replicated).push_back(names[i]);
  }
  return axes;
}

}  // namespace lockstep
