#pragma once

// Internal: the tensors of cross entropy, all allocated, for the CPU's and the devices' kernels.

#include <ATen/core/Tensor.h>

#include "lockstep/kernels/cross_entropy.h"
#include "lockstep/kernels/cross_entropy_rows.h"
#include "lockstep/kernels/storage_of.h"

namespace lockstep::kernels {

/// [tokens, width]: logits, and result, which may be the same. [tokens]: labels; grads and losses,
/// in the sums' dtype. All are contiguous except `sums.sums`, whose rows are. `result` and `grads`
/// are for the gradient, `losses` is for the losses, which do not need `logits`.
struct CrossEntropyTensors {
  at::Tensor logits = {}, labels = {};
  CrossEntropySums sums = {};
  at::Tensor grads = {}, result = {}, losses = {};
  LossColumns columns = {};
  int64_t vocab_size = 0;
  double share = 0;

  bool smoothed() const { return sums.sums.size(0) > 2; }
  int64_t num_tokens() const { return labels.size(0); }

  template <class T>
  CrossEntropyRows<T> rows() const {
    using W = Wide<T>;
    return {elements<T>(logits),    elements<int64_t>(labels), elements<W>(sums.highest),
            elements<W>(sums.sums), sums.sums.stride(0),       columns};
  }

  template <class W>
  CrossEntropyLosses<W> token_losses() const {
    return {elements<int64_t>(labels),
            elements<W>(sums.highest),
            elements<W>(sums.sums),
            elements<W>(losses),
            sums.sums.stride(0),
            vocab_size,
            kIgnoredToken,
            static_cast<W>(share)};
  }

  template <class T>
  CrossEntropyGradientRows<T> gradient_rows() const {
    using W = Wide<T>;
    return {elements<T>(logits),
            elements<int64_t>(labels),
            elements<W>(sums.highest),
            elements<W>(sums.sums) + sums.sums.stride(0),
            elements<W>(grads),
            elements<T>(result),
            columns,
            vocab_size,
            kIgnoredToken,
            static_cast<W>(share)};
  }
};

}  // namespace lockstep::kernels
