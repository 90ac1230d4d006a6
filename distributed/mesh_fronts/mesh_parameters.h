#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "lockstep/parallel_state/dtensor.h"

namespace lockstep {

/// A parameter for the fronts that read off placements what has to be reduced: a DTensor, or a
/// plain tensor, which is this rank's own business.
///
/// A DTensor parameter is one whose local part is the leaf that autograd knows:
///
///     at::Tensor local = at::empty({...}).requires_grad_(true);
///     MeshParameter(DTensor::from_local(local, mesh, {Replicate{}, Shard{0}}), "weight");
struct MeshParameter {
  /// A plain tensor, the same on all ranks or this rank's alone.
  MeshParameter(at::Tensor plain, std::string with_name = "")
      : tensor(std::move(plain)), name(std::move(with_name)) {}
  MeshParameter(DTensor distributed, std::string with_name = "",
                std::vector<std::string> complete = {})
      : tensor(distributed.to_local()),
        dtensor(std::move(distributed)),
        name(std::move(with_name)),
        complete_axes(std::move(complete)) {}

  at::Tensor tensor;               ///< what this rank holds
  std::optional<DTensor> dtensor;  ///< unset: plain
  std::string name;                ///< for messages
  /// Axes of the mesh on which the gradient leaves backward the same on all ranks, though the
  /// parameter is replicated there and reduced elsewhere: a layer norm's weight over tp. The
  /// placement cannot tell it.
  std::vector<std::string> complete_axes;
};

/// A list of them without repetition: of a tied weight, which a module holds twice, the first
/// stays. Parameters without a name are called "parameter 3", by their position. A list with an
/// undefined tensor is refused by what takes it, so that other ranks can be told.
class MeshParameters {
 public:
  MeshParameters() = default;
  MeshParameters(std::initializer_list<MeshParameter> parameters)
      : MeshParameters(std::vector<MeshParameter>(parameters)) {}
  MeshParameters(std::vector<MeshParameter> parameters);
  /// Plain tensors, such as module.parameters().
  MeshParameters(const std::vector<at::Tensor>& tensors);
  MeshParameters(const std::vector<DTensor>& tensors);
  /// The parameters of a module, under their dotted names. They are plain.
  MeshParameters(const torch::nn::Module& module);

  auto begin() const { return parameters_.begin(); }
  auto end() const { return parameters_.end(); }
  size_t size() const { return parameters_.size(); }
  const MeshParameter& operator[](size_t index) const { return parameters_[index]; }

  /// UsageError if one of the tensors was undefined, with its position and name.
  void check() const;
  /// What check() will say; empty if nothing.
  const std::string& fault() const { return fault_; }
  /// The job of the first DTensor; nullptr if all are plain.
  const ParallelState* job() const;

 private:
  std::vector<MeshParameter> parameters_;
  std::string fault_;
};

/// The axes of the mesh along which a DTensor is replicated and along which it is sharded, in the
/// order of the mesh. UsageError, naming the parameter, for a Partial placement.
struct ParameterAxes {
  std::vector<std::string> replicated;
  std::vector<std::string> sharded;
};
ParameterAxes axes_of(const MeshParameter& parameter);

}  // namespace lockstep
