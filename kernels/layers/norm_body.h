#pragma once

// Internal: what RMSNorm and LayerNorm do with rows, for any block policy: a VectorBlock or a
// ThreadBlock. No libtorch here, see adamw_loop.h.

#include <cstdint>

#include "lockstep/kernels/norm_rows.h"

namespace lockstep::kernels {

/// Rows `first` to `end`.
template <bool kCentred, class Block, class T>
LOCKSTEP_LANE void norm_rows(Block block, const NormRows<T>& a, int64_t first, int64_t end) {
  using W = Wide<T>;
  const int64_t width = a.width;
  for (int64_t row = first; row < end; ++row) {
    const T* source = a.x + row * width;
    if (a.residual) {
      const T* const x = source;
      const T* const residual = a.residual + row * width;
      T* const sum = a.sum + row * width;
      block.each(width, [=](int64_t i) LOCKSTEP_LANE_LAMBDA {
        narrow(widen(x[i]) + widen(residual[i]), sum[i]);
      });
      source = sum;
    }
    W mean = 0;
    if constexpr (kCentred)
      mean = block.template sum<W>(width, [=](int64_t i) LOCKSTEP_LANE_LAMBDA {
        return widen(source[i]);
      }) / static_cast<W>(width);
    const W squares = block.template sum<W>(width, [=](int64_t i) LOCKSTEP_LANE_LAMBDA {
      const W centred = widen(source[i]) - mean;
      return centred * centred;
    });
    const W root = 1 / lane_sqrt(squares / static_cast<W>(width) + static_cast<W>(a.epsilon));
    if (block.leads()) {
      if constexpr (kCentred) a.mean[row] = mean;
      a.root[row] = root;
    }
    const W *const weight = a.weight, *const bias = a.bias;
    T* const result = a.normalized + row * width;
    block.each(width, [=](int64_t i) LOCKSTEP_LANE_LAMBDA {
      W y = (widen(source[i]) - mean) * root * weight[i];
      if constexpr (kCentred) y += bias[i];
      narrow(y, result[i]);
    });
  }
}

/// Backward of the rows `first` to `end`. `of_weight` and `of_bias` [width] get their terms of the
/// parameters' gradients; the first is null where nobody wants them.
template <bool kCentred, class Block, class T>
LOCKSTEP_LANE void norm_gradient_rows(Block block, const NormGradientRows<T>& a, int64_t first,
                                      int64_t end, Wide<T>* of_weight, Wide<T>* of_bias) {
  using W = Wide<T>;
  const int64_t width = a.width;
  const W* const weight = a.weight;
  if (of_weight)
    block.each(width, [=](int64_t i) LOCKSTEP_LANE_LAMBDA {
      of_weight[i] = 0;
      if constexpr (kCentred) of_bias[i] = 0;
    });
  for (int64_t row = first; row < end; ++row) {
    const T *const grad = a.grad + row * width, *const source = a.source + row * width;
    const W root = a.root[row];
    W mean = 0, shift = 0;
    if constexpr (kCentred) {
      mean = a.mean[row];
      shift = block.template sum<W>(width, [=](int64_t i) LOCKSTEP_LANE_LAMBDA {
        return widen(grad[i]) * weight[i];
      }) / static_cast<W>(width);
    }
    const W slope = block.template sum<W>(width, [=](int64_t i) LOCKSTEP_LANE_LAMBDA {
      return widen(grad[i]) * weight[i] * ((widen(source[i]) - mean) * root);
    }) / static_cast<W>(width);
    T* const result = a.input_grad + row * width;
    const auto gradient = [=](int64_t i) LOCKSTEP_LANE_LAMBDA {
      const W normal = (widen(source[i]) - mean) * root;
      return root * (widen(grad[i]) * weight[i] - shift - normal * slope);
    };
    if (a.sum_grad) {
      const T* const passed = a.sum_grad + row * width;
      block.each(width, [=](int64_t i) LOCKSTEP_LANE_LAMBDA {
        narrow(gradient(i) + widen(passed[i]), result[i]);
      });
    } else {
      block.each(width, [=](int64_t i) LOCKSTEP_LANE_LAMBDA { narrow(gradient(i), result[i]); });
    }
    if (of_weight)
      block.each(width, [=](int64_t i) LOCKSTEP_LANE_LAMBDA {
        of_weight[i] += widen(grad[i]) * ((widen(source[i]) - mean) * root);
        if constexpr (kCentred) of_bias[i] += widen(grad[i]);
      });
  }
}

}  // namespace lockstep::kernels
