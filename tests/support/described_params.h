#pragma once

#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "lockstep/core/parameters.h"

namespace lockstep::testing {

/// A token count of zero for finalize_model_grads, which then divides by 1.
inline at::Tensor no_tokens() { return at::zeros({}, at::kLong); }

/// A module of described parameters whose gradients the test chooses.
class DescribedParams : public DescribedModule {
 public:
  DescribedParams& add(const std::string& name, std::vector<int64_t> shape,
                       ParamDescription description = {}, at::ScalarType dtype = at::kDouble) {
    params_.emplace_back(
        name, register_described_parameter(name, at::zeros(shape, dtype), std::move(description)));
    return *this;
  }

  /// Runs a backward that leaves `gradient_of(name, parameter)` in each parameter: a tensor of the
  /// parameter's shape, or a number for all elements.
  template <class GradientOf>
  void backward(GradientOf gradient_of) {
    at::Tensor loss = at::zeros({}, at::kDouble);
    for (const auto& [name, param] : params_)
      loss = loss + (param.to(at::kDouble) * gradient_of(name, param)).sum();
    loss.backward();
  }

  const at::Tensor& operator[](const std::string& name) const {
    for (const auto& [own, param] : params_)
      if (own == name) return param;
    throw std::out_of_range(name);
  }
  at::Tensor grad(const std::string& name) const { return (*this)[name].grad(); }
  const std::vector<std::pair<std::string, at::Tensor>>& params() const { return params_; }

 private:
  std::vector<std::pair<std::string, at::Tensor>> params_;
};

}  // namespace lockstep::testing
