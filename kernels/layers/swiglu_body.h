#pragma once

// Internal: SwiGLU for a row, for any block policy. No libtorch here, see adamw_loop.h.

#include <cstdint>

#include "lockstep/kernels/float_storage.h"

namespace lockstep::kernels {

/// `gate` and `up` [width] -> `result` [width]
template <class Block, class T>
LOCKSTEP_LANE void swiglu_row(Block block, const T* gate, const T* up, T* result, int64_t width) {
  using W = Wide<T>;
  block.map(
      width, [](W x, W of_up) LOCKSTEP_LANE_LAMBDA { return x / (1 + Block::exp(-x)) * of_up; },
      result, gate, up);
}

template <class Block, class T>
LOCKSTEP_LANE void swiglu_gradient_row(Block block, const T* grad, const T* gate, const T* up,
                                       T* of_gate, T* of_up, int64_t width) {
  using W = Wide<T>;
  block.map_two(
      width,
      [](W g, W x, W u) LOCKSTEP_LANE_LAMBDA {
        const W share = 1 / (1 + Block::exp(-x));
        return Two<W>{g * u * (share * (1 + x * (1 - share))), g * (x * share)};
      },
      of_gate, of_up, grad, gate, up);
}

}  // namespace lockstep::kernels
