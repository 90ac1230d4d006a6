#pragma once

// Internal.

#include <memory>

#include <c10/util/ThreadLocalDebugInfo.h>

namespace lockstep {

/// While one lives, what a backward that this thread starts captures of a parameter's gradient
/// (torch::autograd::grad) goes on to the parameter's .grad() and hook, as in an ordinary backward.
/// A layer may then add its gradient there by itself. Otherwise a captured gradient is the
/// caller's, and .grad() stays as it is.
class CapturesAccumulate {
 public:
  CapturesAccumulate() : guard_(kKind, std::make_shared<Mark>()) {}

  /// Whether it holds for the backward that runs on this thread, which may be one of autograd's own
  /// for a device: autograd hands libtorch's thread-local information on to it.
  static bool any() {
    return dynamic_cast<const Mark*>(c10::ThreadLocalDebugInfo::get(kKind)) != nullptr;
  }

 private:
  struct Mark : c10::DebugInfoBase {};
  static constexpr auto kKind = c10::DebugInfoKind::PRODUCER_INFO;

  c10::DebugInfoGuard guard_;
};

}  // namespace lockstep
