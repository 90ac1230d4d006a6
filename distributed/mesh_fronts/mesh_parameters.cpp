#include "lockstep/distributed/mesh_parameters.h"

#include <set>

#include "lockstep/core/check.h"
#include "lockstep/core/parameters.h"

namespace lockstep {
namespace {

template <class Tensors>
std::vector<MeshParameter> without_names(const Tensors& tensors) {
  return std::vector<MeshParameter>(tensors.begin(), tensors.end());
}

std::vector<MeshParameter> parameters_of(const torch::nn::Module& module) {
  std::vector<MeshParameter> result;
  for (NamedParameter& parameter : collect_parameters(module))
    result.emplace_back(std::move(parameter.tensor), std::move(parameter.name));
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
