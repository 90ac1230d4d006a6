#pragma once

#include <memory>

namespace lockstep {

/// While one lives, or a copy of it, gradients are accumulated and nothing is reduced. Guards nest.
using NoSyncGuard = std::shared_ptr<const void>;

/// The guards of one front that live. They may outlive it.
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
