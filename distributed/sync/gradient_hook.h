#pragma once

// Internal.

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>

#include "lockstep/core/parameters.h"

namespace lockstep {

/// Is notified of gradients.
class GradientObserver {
 public:
  /// The parameter that was registered as number `position` has its gradient. `in_place`: it was
  /// accumulated into the expected tensor.
  virtual void on_gradient(int64_t position, bool in_place) = 0;

  /// The class that this observer works for: "DistributedDataParallel".
  virtual std::string front() const = 0;

  /// Why the parameter's grad() does not hold its gradient now: "is not reduced yet (...)", and
  /// what to call; empty if it does.
  virtual std::string unfinished() const = 0;

  /// Why the reduced value is not the model's gradient yet: "is not final (...)", and what to call;
  /// empty if it is, or if unfinished() says more.
  virtual std::string not_final() const { return ""; }

 protected:
  ~GradientObserver() = default;
};

/// Notifies `observer` each time autograd has accumulated a gradient into a leaf parameter, once
/// per backward pass that reaches it, until this object is destroyed. If the observer throws, that
/// backward() ends with the exception.
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

/// The observer of the parameter's GradientHook; null if it has none.
const GradientObserver* observer_of(const at::Tensor& parameter);

/// UsageError, naming the parameter and the front, if it is trained and has a
/// post-accumulate-gradient hook already.
void refuse_hooked(const NamedParameter& parameter);

/// UsageError, naming `caller` and the parameter, if a front has taken it over and unfinished()
/// says why its grad() cannot be read.
void refuse_unfinished(const std::string& name, const at::Tensor& parameter, const char* caller);

/// UsageError, naming `caller` and the parameter, if a front has taken it over and not_final() says
/// that its grad() has to be changed before it is the model's gradient.
void refuse_not_final(const std::string& name, const at::Tensor& parameter, const char* caller);

}  // namespace lockstep
