#pragma once

// Internal: cross entropy of rows of logits, for any block policy: a VectorBlock or a ThreadBlock.
// No libtorch here, see adamw_loop.h.

#include <cstdint>

#include "lockstep/kernels/cross_entropy_rows.h"
#include "lockstep/kernels/exp_sums.h"

namespace lockstep::kernels {

/// The contribution of this rank's columns to the softmax of the rows `first` to `end`, in one pass
/// over the logits.
template <bool kSmoothed, class Block, class T>
LOCKSTEP_LANE void cross_entropy_rows(Block block, const CrossEntropyRows<T>& a, int64_t first,
                                      int64_t end) {
  using W = Wide<T>;
  const LossColumns columns = a.columns;
  for (int64_t row = first; row < end; ++row) {
    const T* const logits = a.logits + row * columns.width;
    const ExpSums<W> found = block.template exp_sums<kSmoothed, W>(columns.held, logits);
    if (!block.leads()) continue;
    const int64_t column = a.labels[row] - columns.first;
    const bool here = column >= 0 && column < columns.held;
    a.highest[row] = found.highest;
    a.sums[row] = here ? widen(logits[column]) : W(0);
    a.sums[a.stride + row] = found.exponentials;
    if constexpr (kSmoothed) a.sums[2 * a.stride + row] = found.plain;
  }
}

/// The losses of `n` tokens from `first` on, rounded once: they are small differences of larger
/// numbers.
template <bool kSmoothed, class Block, class W>
LOCKSTEP_LANE void cross_entropy_losses(Block block, const CrossEntropyLosses<W>& a, int64_t first,
                                        int64_t n) {
  const int64_t *const labels = a.labels + first, stride = a.stride;
  const W *const highest = a.highest + first, *const sums = a.sums + first;
  W* const losses = a.losses + first;
  const double size = static_cast<double>(a.vocab_size), share = a.share;
  const int64_t vocab_size = a.vocab_size, ignored = a.ignored;
  constexpr W kNan = CrossEntropyLosses<W>::kNan;
  block.each(n, [=](int64_t i) LOCKSTEP_LANE_LAMBDA {
    const double most = highest[i];
    double loss = lane_log(double{sums[stride + i]}) - (sums[i] - most) * (1 - share);
    if constexpr (kSmoothed) loss -= (sums[2 * stride + i] - size * most) * (share / size);
    const int64_t label = labels[i];
    W rounded = static_cast<W>(loss);
    if (label < 0 || label >= vocab_size) rounded = label == ignored ? W(0) : kNan;
    losses[i] = rounded;
  });
}

/// The gradient of the logits in the rows `first` to `end`. Each element is read and written by one
/// lane.
template <class Block, class T>
LOCKSTEP_LANE void cross_entropy_gradient_rows(Block block, const CrossEntropyGradientRows<T>& a,
                                               int64_t first, int64_t end) {
  using W = Wide<T>;
  const LossColumns columns = a.columns;
  for (int64_t row = first; row < end; ++row) {
    const T* const logits = a.logits + row * columns.width;
    T* const result = a.result + row * columns.width;
    const int64_t label = a.labels[row], column = label - columns.first;
    const auto nothing = []() LOCKSTEP_LANE_LAMBDA { return W(0); };
    if (label == a.ignored) {
      block.map(columns.width, nothing, result);
      continue;
    }
    const W grad = a.grads[row], highest = a.highest[row], scale = grad / a.exponentials[row];
    const W shift = grad * (a.share / static_cast<W>(a.vocab_size));
    const auto gradient = [=](W x) LOCKSTEP_LANE_LAMBDA {
      return scale * exp_below<Block>(x, highest) - shift;
    };
    // The lane of the label reads its logit before the gradient overwrites it.
    const bool own = column >= 0 && column < columns.held && block.owns(column);
    const W of_label = own ? gradient(widen(logits[column])) + grad * (a.share - 1) : W(0);
    block.map(columns.held, gradient, result, logits);
    if (own) narrow(of_label, result[column]);
    const int64_t held = columns.held;
    block.each(columns.width - held,
               [=](int64_t i) LOCKSTEP_LANE_LAMBDA { narrow(W(0), result[held + i]); });
  }
}

}  // namespace lockstep::kernels
