#pragma once

#include <cstdint>

namespace lockstep::kernels {

/// Elements [start, end) of the flat tensors that an update changes.
struct UpdateSegment {
  int64_t start = 0;
  int64_t end = 0;
};

}  // namespace lockstep::kernels
