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
    W mean = 0;
    if (a.residual) {
      const T* const x = source;
      const T* const residual = a.residual + row * width;
      T* const sum = a.sum + row * width;
      const auto add = [](W a, W b) LOCKSTEP_LANE_LAMBDA { return a + b; };
      if constexpr (kCentred)
        mean = block.template map_sum<W>(width, add, sum, x, residual);
      else
        block.map(width, add, sum, x, residual);
      source = sum;
    } else if constexpr (kCentred) {
      mean = block.template sum<W>(
          width, [](W x) LOCKSTEP_LANE_LAMBDA { return x; }, source);
    }
    if constexpr (kCentred) mean /= static_cast<W>(width);
    const W squares = block.template sum<W>(
        width,
        [=](W x) LOCKSTEP_LANE_LAMBDA {
          const W centred = x - mean;
          return centred * centred;
        },
        source);
    const W root = 1 / lane_sqrt(squares / static_cast<W>(width) + static_cast<W>(a.epsilon));
    if (block.leads()) {
      if constexpr (kCentred) a.mean[row] = mean;
      a.root[row] = root;
    }
    T* const result = a.normalized + row * width;
    if constexpr (kCentred)
      block.map(
          width,
          [=](W x, W weight, W bias)
              LOCKSTEP_LANE_LAMBDA { return (x - mean) * root * weight + bias; },
          result, source, a.weight, a.bias);
    else
      block.map(
          width, [=](W x, W weight) LOCKSTEP_LANE_LAMBDA { return (x - mean) * root * weight; },
          result, source, a.weight);
  }
}

/// Backward of the rows `first` to `end`. `of_weight` and `of_bias` [width] receive these rows'
/// terms of the parameters' gradients; the first is null if they are not wanted.
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
      shift = block.template sum<W>(
                  width, [](W g, W w) LOCKSTEP_LANE_LAMBDA { return g * w; }, grad, weight) /
              static_cast<W>(width);
    }
    const W slope =
        block.template sum<W>(
            width, [=](W g, W w, W x) LOCKSTEP_LANE_LAMBDA { return g * w * ((x - mean) * root); },
            grad, weight, source) /
        static_cast<W>(width);
    T* const result = a.input_grad + row * width;
    const auto gradient = [=](W g, W w, W x) LOCKSTEP_LANE_LAMBDA {
      const W normal = (x - mean) * root;
      return root * (g * w - shift - normal * slope);
    };
    if (a.sum_grad)
      block.map(
          width,
          [=](W g, W w, W x, W passed) LOCKSTEP_LANE_LAMBDA { return gradient(g, w, x) + passed; },
          result, grad, weight, source, a.sum_grad + row * width);
    else
      block.map(width, gradient, result, grad, weight, source);
    if (!of_weight) continue;
    block.map(
        width, [=](W all, W g, W x) LOCKSTEP_LANE_LAMBDA { return all + g * ((x - mean) * root); },
        of_weight, of_weight, grad, source);
    if constexpr (kCentred)
      block.map(
          width, [](W all, W g) LOCKSTEP_LANE_LAMBDA { return all + g; }, of_bias, of_bias, grad);
  }
}

}  // namespace lockstep::kernels
