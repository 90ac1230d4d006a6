#pragma once

// Internal.

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>

#include "lockstep/core/parameters.h"

namespace lockstep {

/// Who is told of gradients.
class GradientObserver {
 public:
  /// The parameter that was registered as number `position` has its gradient. `in_place`: it was
  /// accumulated into the expected tensor.
  virtual void on_gradient(int64_t position, bool in_place) = 0;

  /// The class that it works for: "DistributedDataParallel".
  virtual std::string front() const = 0;

  /// Why what the parameter's grad() holds is not its gradient now: "is not reduced yet (...)", and
  /// what to call; empty where it is.
  virtual std::string unfinished() const = 0;

  /// Why what is reduced is no gradient of the model yet: "is not final (...)", and what to call;
  /// empty where it is, or where unfinished() tells more.
  virtual std::string not_final() const { return ""; }

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

/// The observer of the parameter's GradientHook; null where it has none.
const GradientObserver* observer_of(const at::Tensor& parameter);

/// UsageError, naming the parameter and the front, if it is trained and has a
/// post-accumulate-gradient hook already.
void refuse_hooked(const NamedParameter& parameter);

/// UsageError, naming `caller` and the parameter, where a front has taken it over and unfinished()
/// says why its grad() cannot be looked at.
void refuse_unfinished(const std::string& name, const at::Tensor& parameter, const char* caller);

/// UsageError, naming `caller` and the parameter, where a front has taken it over and not_final()
/// says that somebody has to change its grad() before it is the model's.
void refuse_not_final(const std::string& name, const at::Tensor& parameter, const char* caller);

}  // namespace lockstep
