#pragma once

// Internal: the operands of cross_entropy_body.h. No libtorch here, see adamw_loop.h.

#include <cmath>
#include <cstdint>
#include <limits>

#include "lockstep/kernels/float_storage.h"

namespace lockstep::kernels {

/// A rank's columns of the logits [tokens, width]: `held` of them belong to the token ids from
/// `first` on, the others are padding.
struct LossColumns {
  int64_t width, first, held;
};

/// Tensors [tokens]; `logits` [tokens, width]; `sums` [2 or 3, tokens], with its rows `stride`
/// apart.
template <class T>
struct CrossEntropyRows {
  const T* logits;
  const int64_t* labels;
  Wide<T>*highest, *sums;
  int64_t stride;
  LossColumns columns;
};

/// The same, with the sums over all ranks.
template <class W>
struct CrossEntropyLosses {
  static constexpr W kNan = std::numeric_limits<W>::quiet_NaN();

  const int64_t* labels;
  const W *highest, *sums;
  W* losses;
  int64_t stride, vocab_size, ignored;
  W share;
};

/// `result` [tokens, width] may be `logits`.
template <class T>
struct CrossEntropyGradientRows {
  const T* logits;
  const int64_t* labels;
  const Wide<T>*highest, *exponentials, *grads;
  T* result;
  LossColumns columns;
  int64_t vocab_size, ignored;
  Wide<T> share;
};

LOCKSTEP_LANE double lane_log(double x) { return ::log(x); }

}  // namespace lockstep::kernels
