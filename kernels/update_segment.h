#pragma once

#include <cstdint>

namespace lockstep::kernels {

/// Elements [start, end) of the flat tensors of an update, with or without weight decay.
struct UpdateSegment {
  int64_t start = 0;
  int64_t end = 0;
  bool weight_decay = true;
};

}  // namespace lockstep::kernels
