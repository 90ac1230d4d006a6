#pragma once

// Internal.

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "lockstep/core/parameters.h"

namespace lockstep {

/// Who is told of gradients.
class GradientObserver {
 public:
  /// The parameter that was registered as number `position` has its gradient. `in_place`: it was
  /// accumulated into the expected tensor.
  virtual void on_gradient(int64_t position, bool in_place) = 0;

 protected:
  ~GradientObserver() = default;
};

/// Tells `observer` each time autograd has accumulated a gradient into a leaf parameter, once per
/// backward pass that reaches it, until this object goes. An exception of the observer ends that
/// backward() with it.
///
/// It is a post-accumulate-gradient hook of the tensor: a hook on the tensor's AccumulateGrad node
/// would make autograd copy its inputs for each gradient. A tensor has only one: see
/// refuse_hooked().
class GradientHook {
 public:
  GradientHook(const at::Tensor& parameter, const at::Tensor& expected, GradientObserver& observer,
               int64_t position);
  ~GradientHook();
  GradientHook(GradientHook&& other) noexcept = default;
  GradientHook& operator=(GradientHook&&) = delete;

 private:
  at::Tensor parameter_;
};

/// UsageError, naming the parameter, if it is trained and has a post-accumulate-gradient hook
/// already.
void refuse_hooked(const NamedParameter& parameter);

}  // namespace lockstep
