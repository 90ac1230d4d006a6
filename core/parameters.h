#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include "lockstep/core/placement.h"

namespace lockstep {

/// Base of layers that describe their parameters. A layer registers each parameter together with
/// its description; modules of other kinds get default_description() for theirs.
class DescribedModule : public torch::nn::Module {
 public:
  using torch::nn::Module::Module;

  /// The description of the parameter that this module registered under `name`; nullptr if it
  /// registered it without one.
  const ParamDescription* description(const std::string& name) const;

 protected:
  /// torch::nn::Module::register_parameter plus a description. UsageError if it contradicts itself
  /// (see ParamDescription::validate).
  at::Tensor& register_described_parameter(const std::string& name, at::Tensor tensor,
                                           ParamDescription description);

 private:
  std::map<std::string, ParamDescription> descriptions_;
};

/// One parameter of a model.
struct NamedParameter {
  std::string name;  ///< dotted name from the root module, "decoder.layers.0.mlp.linear_fc1.weight"
  at::Tensor tensor;
  ParamDescription description;
};

/// What holds of a parameter that no DescribedModule registered: dense, replicated on every axis,
/// weight decay unless it has fewer than two dimensions.
ParamDescription default_description(const at::Tensor& parameter);

/// All parameters of `module` in the order of their registration, frozen ones included. A tensor
/// that is registered more than once (a tied weight) appears once, under its first name.
std::vector<NamedParameter> collect_parameters(const torch::nn::Module& module);

/// Fills `local` with normal random values that depend on (seed, name, global index of the element)
/// alone, so that every layout starts from the same weights. `local` [any shape, any dtype, any
/// device] is the block that starts at `offset` (elements, one per dimension) of a tensor of shape
/// `global_shape`; `offset` empty means the whole tensor.
void fill_normal(at::Tensor& local, double standard_deviation, uint64_t seed, std::string_view name,
                 at::IntArrayRef global_shape, at::IntArrayRef offset = {});

}  // namespace lockstep
