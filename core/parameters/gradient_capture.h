#pragma once

// Internal.

#include <memory>

#include <c10/util/ThreadLocalDebugInfo.h>

namespace lockstep {

/// While such an object lives, a parameter's gradient that is captured by a backward started on
/// this thread (torch::autograd::grad) is passed on to the parameter's .grad() and hook, as in an
/// ordinary backward. A layer may then add its gradient there itself. Otherwise a captured gradient
/// is the caller's, and .grad() stays as it is.
class CapturesAccumulate {
 public:
  CapturesAccumulate() : guard_(kKind, std::make_shared<Mark>()) {}

  /// Whether this applies to the backward that runs on this thread. The thread may be one of
  /// autograd's own for a device: autograd passes libtorch's thread-local information on to it.
  static bool any() {
    return dynamic_cast<const Mark*>(c10::ThreadLocalDebugInfo::get(kKind)) != nullptr;
  }

 private:
  struct Mark : c10::DebugInfoBase {};
  static constexpr auto kKind = c10::DebugInfoKind::PRODUCER_INFO;

  c10::DebugInfoGuard guard_;
};

}  // namespace lockstep
