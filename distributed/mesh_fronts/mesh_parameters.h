#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "lockstep/core/placement.h"
#include "lockstep/parallel_state/dtensor.h"

namespace lockstep {

/// A parameter for the fronts that derive from placements what to reduce: a DTensor, or a plain
/// tensor, which has no mesh.
///
/// The parameters of a module that describes them (DescribedModule) come from mesh_parameters();
/// the fronts then treat each as its description says. A list that you make by hand has no
/// descriptions: a gradient then counts as a term of the sum over every axis on which its parameter
/// is replicated, unless complete_axes names the axis.
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
  /// Mesh axes on which the gradient is already the same on all ranks after backward, although the
  /// parameter is replicated there and its gradient is reduced over other axes: a layer norm's
  /// weight over tp. The placement cannot express this.
  std::vector<std::string> complete_axes;
  /// The module's description of the parameter; unset: none.
  std::optional<ParamDescription> description = {};
};

/// A list of parameters without duplicates: of a tied weight, which a module holds twice, only the
/// first entry is kept. Parameters without a name are called "parameter 3", by their position. The
/// functions that take a list refuse one with an undefined tensor, so that they can notify other
/// ranks.
class MeshParameters {
 public:
  MeshParameters() = default;
  MeshParameters(std::initializer_list<MeshParameter> parameters)
      : MeshParameters(std::vector<MeshParameter>(parameters)) {}
  MeshParameters(std::vector<MeshParameter> parameters);
  /// Plain tensors, such as module.parameters().
  MeshParameters(const std::vector<at::Tensor>& tensors);
  MeshParameters(const std::vector<DTensor>& tensors);
  /// The parameters of a module, under their dotted names. They are plain tensors without a mesh,
  /// so a front refuses those whose description requires more than the front can do for plain
  /// tensors. See mesh_parameters().
  MeshParameters(const torch::nn::Module& module);

  auto begin() const { return parameters_.begin(); }
  auto end() const { return parameters_.end(); }
  size_t size() const { return parameters_.size(); }
  const MeshParameter& operator[](size_t index) const { return parameters_[index]; }

  /// UsageError if one of the tensors was undefined, with its position and name.
  void check() const;
  /// The message of check()'s error; empty if there is none.
  const std::string& fault() const { return fault_; }
  /// The job of the first DTensor; nullptr if all are plain.
  const ParallelState* job() const;

 private:
  std::vector<MeshParameter> parameters_;
  std::string fault_;
};

/// The parameters of `module` on the meshes of `state`, as their descriptions say: dense ones over
/// the axes tp, cp, dp, experts over etp, ep, edp, and over pp too where every stage holds a copy.
/// complete_axes are the axes on which the gradient is described as complete. The pieces along an
/// axis are assumed to have the same size. The parameters of a module that contains no
/// DescribedModule are dense and replicated everywhere. Sends nothing.
///
/// GradientSynchronizer, all_reduce_grads and clip_grad_norm_ also take a module and a
/// ParallelState, with the same effect. How they then treat each gradient:
///
///     described                      reduced over                       "mean" divides by
///     dense                          dp and cp                          ranks of dp-cp
///     dense, partial-sum over tp     dp, cp and tp, as one group        ranks of dp-cp
///     dense, partial-mean over tp    dp, cp and tp, as one group        ranks of dp-cp, tp always
///     expert                         edp                                ranks of dp-cp
///     partial-sum over pp            pp as well, as one group           as above
///
/// UsageError, naming the parameter and what to use instead; ranks that wait for this one are
/// notified: a tied parameter that may have a copy on another stage or in another tensor; a
/// gradient that is not partial-sum over an axis of several ranks that splits the batch; a layer
/// that was made for other numbers of ranks (NamedParameter::cut_by).
MeshParameters mesh_parameters(const torch::nn::Module& module, const ParallelState& state);

/// The axes of the mesh along which a DTensor is replicated and along which it is sharded, in the
/// order of the mesh. UsageError, naming the parameter, for a Partial placement.
struct ParameterAxes {
  std::vector<std::string> replicated;
  std::vector<std::string> sharded;
};
ParameterAxes axes_of(const MeshParameter& parameter);

}  // namespace lockstep
