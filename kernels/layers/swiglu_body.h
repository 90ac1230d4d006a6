#pragma once

// Internal: SwiGLU of a row, for any block policy. No libtorch here, see adamw_loop.h.

#include <cstdint>

#include "lockstep/kernels/float_storage.h"

namespace lockstep::kernels {

/// `gate` and `up` [width] -> `result` [width]
template <class Block, class T>
LOCKSTEP_LANE void swiglu_row(Block block, const T* gate, const T* up, T* result, int64_t width) {
  block.each(width, [=](int64_t i) LOCKSTEP_LANE_LAMBDA {
    const Wide<T> x = widen(gate[i]);
    narrow(x / (1 + Block::exp(-x)) * widen(up[i]), result[i]);
  });
}

template <class Block, class T>
LOCKSTEP_LANE void swiglu_gradient_row(Block block, const T* grad, const T* gate, const T* up,
                                       T* of_gate, T* of_up, int64_t width) {
  block.each(width, [=](int64_t i) LOCKSTEP_LANE_LAMBDA {
    using W = Wide<T>;
    const W x = widen(gate[i]), g = widen(grad[i]);
    const W share = 1 / (1 + Block::exp(-x));
    narrow(g * widen(up[i]) * (share * (1 + x * (1 - share))), of_gate[i]);
    narrow(g * (x * share), of_up[i]);
  });
}

}  // namespace lockstep::kernels
