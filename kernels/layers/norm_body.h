#pragma once

// Internal: what RMSNorm and LayerNorm do with rows, for any block policy: a VectorBlock or a
// ThreadBlock. No libtorch here, see adamw_loop.h.

#include <cstdint>

#include "lockstep/kernels/norm_rows.h"

namespace lockstep::kernels {

/// Adds the residual, if there is one, to the row from element `at` on. Returns the sum of the
/// row's elements if `kCentred`, otherwise 0.
template <bool kCentred, class Block, class T>
LOCKSTEP_LANE Wide<T> added_row(Block block, const NormRows<T>& a, int64_t at) {
  using W = Wide<T>;
  const T* const x = a.x + at;
  if (a.residual) {
    const auto add = [](W one, W other) LOCKSTEP_LANE_LAMBDA { return one + other; };
    if constexpr (kCentred)
      return block.template map_sum<W>(a.width, add, a.sum + at, x, a.residual + at);
    block.map(a.width, add, a.sum + at, x, a.residual + at);
  } else if constexpr (kCentred) {
    return block.template sum<W>(
        a.width, [](W element) LOCKSTEP_LANE_LAMBDA { return element; }, x);
  }
  return 0;
}

/// Rows `first` to `end`. A core takes several narrow rows at a time, one step of all after
/// another: their sums, divisions and roots do not depend on each other.
template <bool kCentred, class Block, class T>
LOCKSTEP_LANE void norm_rows(Block block, const NormRows<T>& a, int64_t first, int64_t end) {
  using W = Wide<T>;
  const int64_t width = a.width;
  const T* const from = a.residual ? a.sum : a.x;
  const int64_t step = Block::template rows_together<T>(width);
  W mean[Block::kMostRows] = {}, squares[Block::kMostRows];
  for (int64_t begin = first; begin < end; begin += step) {
    const int64_t count = end - begin < step ? end - begin : step;
    for (int64_t k = 0; k < count; ++k) {
      const W sum = added_row<kCentred>(block, a, (begin + k) * width);
      if constexpr (kCentred) mean[k] = sum / static_cast<W>(width);
    }
    for (int64_t k = 0; k < count; ++k)
      squares[k] = block.template sum<W>(
          width,
          [mean = mean[k]](W x) LOCKSTEP_LANE_LAMBDA {
            const W centred = x - mean;
            return centred * centred;
          },
          from + (begin + k) * width);
    for (int64_t k = 0; k < count; ++k) {
      const W root = 1 / lane_sqrt(squares[k] / static_cast<W>(width) + static_cast<W>(a.epsilon));
      if (block.leads()) {
        if constexpr (kCentred) a.mean[begin + k] = mean[k];
        a.root[begin + k] = root;
      }
      const auto normal = [mean = mean[k], root](W x)
                              LOCKSTEP_LANE_LAMBDA { return (x - mean) * root; };
      const T* const source = from + (begin + k) * width;
      T* const result = a.normalized + (begin + k) * width;
      if constexpr (kCentred)
        block.map(
            width,
            [=](W x, W weight, W bias) LOCKSTEP_LANE_LAMBDA { return normal(x) * weight + bias; },
            result, source, a.weight, a.bias);
      else
        block.map(
            width, [=](W x, W weight) LOCKSTEP_LANE_LAMBDA { return normal(x) * weight; }, result,
            source, a.weight);
    }
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
    const auto gradient = [=](W g, W w, W normal) LOCKSTEP_LANE_LAMBDA {
      return root * (g * w - shift - normal * slope);
    };
    const auto update = [=](auto*... passed_row) LOCKSTEP_LANE_LAMBDA {
      T* const result = a.input_grad + row * width;
      if (!of_weight)
        return block.map(
            width,
            [=](W g, W w, W x, auto... passed)
                LOCKSTEP_LANE_LAMBDA { return (gradient(g, w, (x - mean) * root) + ... + passed); },
            result, grad, weight, source, passed_row...);
      if constexpr (kCentred)
        block.map_three(
            width,
            [=](W weights, W biases, W g, W w, W x, auto... passed) LOCKSTEP_LANE_LAMBDA {
              const W normal = (x - mean) * root;
              return Three<W>{(gradient(g, w, normal) + ... + passed), weights + g * normal,
                              biases + g};
            },
            result, of_weight, of_bias, of_weight, of_bias, grad, weight, source, passed_row...);
      else
        block.map_two(
            width,
            [=](W weights, W g, W w, W x, auto... passed) LOCKSTEP_LANE_LAMBDA {
              const W normal = (x - mean) * root;
              return Two<W>{(gradient(g, w, normal) + ... + passed), weights + g * normal};
            },
            result, of_weight, of_weight, grad, weight, source, passed_row...);
    };
    a.sum_grad ? update(a.sum_grad + row * width) : update();
  }
}

}  // namespace lockstep::kernels
