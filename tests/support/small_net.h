#pragma once

#include <string>
#include <vector>

#include <torch/nn/functional/activation.h>
#include <torch/nn/module.h>

#include "lockstep/core/parameters.h"

namespace lockstep::testing {

/// A network of `layers` tanh layers of odd sizes. The weights depend only on the parameter's name.
/// The loss is a sum over samples.
class SmallNet : public torch::nn::Module {
 public:
  static constexpr int64_t kInputs = 3;

  explicit SmallNet(int layers = 3, at::ScalarType dtype = at::kDouble,
                    c10::Device device = c10::kCPU) {
    int64_t width = kInputs;
    for (int i = 0; i < layers; ++i) {
      const int64_t next = 4 + (i * 3) % 5;
      add("weight" + std::to_string(i), {next, width}, dtype, device);
      add("bias" + std::to_string(i), {next}, dtype, device);
      width = next;
    }
  }

  /// Sum over samples and outputs of the squared output. `input` [samples, kInputs].
  at::Tensor loss(at::Tensor input) const {
    for (size_t i = 0; i < params_.size(); i += 2)
      input = at::tanh(at::linear(input, params_[i], params_[i + 1]));
    return input.square().sum();
  }

  /// `count` samples of an endless data set, starting at sample `first`.
  static at::Tensor samples(int64_t first, int64_t count, at::ScalarType dtype = at::kDouble) {
    return at::sin(at::arange(first * kInputs, (first + count) * kInputs, at::kDouble) * 0.7)
        .view({count, kInputs})
        .to(dtype);
  }

 private:
  void add(const std::string& name, std::vector<int64_t> shape, at::ScalarType dtype,
           c10::Device device) {
    at::Tensor tensor = at::empty(shape, at::TensorOptions(dtype));
    fill_normal(tensor, 0.5, 1, name, shape);
    params_.push_back(register_parameter(name, tensor.to(device)));
  }

  std::vector<at::Tensor> params_;
};

/// The parameters of a module without descriptions. Those that `is_matrix` selects are described as
/// matrices.
template <class Predicate>
std::vector<NamedParameter> with_matrices(const torch::nn::Module& module, Predicate is_matrix) {
  std::vector<NamedParameter> params = collect_parameters(module);
  for (NamedParameter& param : params)
    if (is_matrix(param)) param.description.update = ParamUpdate::matrix;
  return params;
}

}  // namespace lockstep::testing
