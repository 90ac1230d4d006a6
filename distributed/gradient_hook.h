#pragma once

// Internal.

#include <functional>
#include <memory>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

namespace lockstep {

/// Calls a function each time autograd has accumulated a gradient into a leaf parameter, once per
/// backward pass that reaches it, until this object goes. An exception of the function ends that
/// backward() with it.
class GradientHook {
 public:
  GradientHook(const at::Tensor& parameter, std::function<void()> call);
  ~GradientHook();
  GradientHook(GradientHook&& other) noexcept = default;
  GradientHook& operator=(GradientHook&&) = delete;

 private:
  std::shared_ptr<torch::autograd::Node> accumulator_;  // autograd itself holds it weakly
  uintptr_t key_;
};

}  // namespace lockstep
