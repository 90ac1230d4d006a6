#pragma once

#include <memory>

namespace lockstep {

/// While a guard or a copy of it exists, gradients are accumulated and nothing is reduced. Guards
/// can be nested.
using NoSyncGuard = std::shared_ptr<const void>;

/// Counts the live guards of one front. Guards may outlive the front.
class NoSyncDepth {
 public:
  [[nodiscard]] NoSyncGuard enter() {
    ++*depth_;
    return {nullptr, [depth = depth_](const void*) { --*depth; }};
  }
  bool inside() const { return *depth_ > 0; }

 private:
  std::shared_ptr<int> depth_ = std::make_shared<int>(0);
};

}  // namespace lockstep
