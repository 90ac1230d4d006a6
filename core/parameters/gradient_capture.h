#pragma once

// Internal.

namespace lockstep {

/// While one lives, what this thread captures of a parameter's gradient (torch::autograd::grad)
/// goes on to the parameter's .grad() and hook, as in an ordinary backward. A layer may then add its
/// gradient there by itself. Otherwise a captured gradient is the caller's, and .grad() stays as it
/// is.
class CapturesAccumulate {
 public:
  CapturesAccumulate() { ++depth_; }
  ~CapturesAccumulate() { --depth_; }
  CapturesAccumulate(const CapturesAccumulate&) = delete;
  CapturesAccumulate& operator=(const CapturesAccumulate&) = delete;

  static bool any() { return depth_ > 0; }

 private:
  static inline thread_local int depth_ = 0;
};

}  // namespace lockstep
