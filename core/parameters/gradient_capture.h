#pragma once

// Internal.

#include <cstdint>
#include <memory>
#include <optional>

#include <c10/util/ThreadLocalDebugInfo.h>

namespace lockstep {

/// The backward that a caller has started, for what runs inside it.
struct OuterBackward {
  /// Its number, as autograd counts graph tasks; in parts, that of the first one, and -1 until that
  /// is over.
  int64_t pass = -1;
  bool in_parts = false;  ///< it is a SplitBackward
};

/// While such an object lives, a parameter's gradient that is captured by a backward started on
/// this thread (torch::autograd::grad) is passed on to the parameter's .grad() and hook, as in an
/// ordinary backward. A layer may then add its gradient there itself. Otherwise a captured gradient
/// is the caller's, and .grad() stays as it is. What a backward left for later runs in such an
/// object, too, so that a hook knows which backward its gradient belongs to.
class CapturesAccumulate {
 public:
  /// `outer`: the backward that the one on this thread is part of.
  explicit CapturesAccumulate(const OuterBackward& outer)
      : guard_(kKind, std::make_shared<Mark>(outer)) {}

  /// What such an object says about the backward that runs on this thread; unset: there is none.
  /// The thread may be one of autograd's own for a device: autograd passes libtorch's thread-local
  /// information on to it.
  static std::optional<OuterBackward> outer() {
    const auto* const mark = dynamic_cast<const Mark*>(c10::ThreadLocalDebugInfo::get(kKind));
    return mark ? std::optional(mark->outer) : std::nullopt;
  }
  static bool any() { return outer().has_value(); }

 private:
  struct Mark : c10::DebugInfoBase {
    explicit Mark(const OuterBackward& o) : outer(o) {}
    OuterBackward outer;
  };
  static constexpr auto kKind = c10::DebugInfoKind::PRODUCER_INFO;

  c10::DebugInfoGuard guard_;
};

}  // namespace lockstep
