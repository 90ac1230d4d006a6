#pragma once

// Internal.

#include <ATen/record_function.h>

namespace lockstep {

/// While it lives, watches whether an operator of libtorch on this thread gets a tensor that
/// requires a gradient.
class GradientWatch {
 public:
  GradientWatch();
  ~GradientWatch();
  GradientWatch(const GradientWatch&) = delete;
  GradientWatch& operator=(const GradientWatch&) = delete;

  bool seen() const { return seen_; }

 private:
  static std::unique_ptr<at::ObserverContext> on_operator(const at::RecordFunction& call);

  GradientWatch* outer_;
  bool seen_ = false;
  at::CallbackHandle handle_;
};

}  // namespace lockstep
