#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace lockstep::kernels {

/// The label of a token whose loss is 0 and has no gradient.
inline constexpr int64_t kIgnoredToken = -100;

/// Which token ids the columns of the logits stand for: `held` of them, first, first + 1, ...; the
/// columns behind them are padding.
struct TokenColumns {
  int64_t first = 0, held = 0;
};

/// Of the logits of tokens, in fp32, or fp64 for fp64 logits.
struct CrossEntropySums {
  at::Tensor highest;  ///< of each token: [tokens], -inf without columns
  /// [2, tokens], with label smoothing [3, tokens]: the label's logit, 0 if its column is not here;
  /// the sum of e^(logit - highest); the sum of the logits. The rows are contiguous.
  at::Tensor sums;
};

/// Room for the sums of `tokens` like `logits`.
CrossEntropySums make_cross_entropy_sums(int64_t tokens, const at::Tensor& logits, bool smoothed);

/// Writes the sums of `logits` [tokens, width] of fp32, fp64, bf16 or fp16 under `labels` [tokens]
/// of int64 into `sums`, in one pass over memory (Milakov and Gimelshein, "Online normalizer
/// calculation for softmax", 2018). The same bits for any number of threads. Nothing waits for a
/// device. UsageError for another dtype.
void cross_entropy_sums(const at::Tensor& logits, const at::Tensor& labels,
                        const TokenColumns& columns, const CrossEntropySums& sums);

/// log(sum of exponentials) - (1 - share) (label's logit - highest) - share / vocab_size (sum of
/// logits - vocab_size highest), from sums over all `vocab_size` token ids; 0 for kIgnoredToken and
/// NaN for another label outside of them -> [tokens]. `share` is of tokens' mean in the target,
/// above 0 where the sums are smoothed.
at::Tensor cross_entropy_losses(const CrossEntropySums& sums, const at::Tensor& labels,
                                int64_t vocab_size, double share);

/// Writes the gradient of the logits, from `grads` [tokens] of the losses, into `result`, which may
/// be `logits`, contiguous then. Padding gets 0.
void cross_entropy_gradient(const at::Tensor& grads, const at::Tensor& logits,
                            const at::Tensor& labels, const TokenColumns& columns,
                            const CrossEntropySums& sums, int64_t vocab_size, double share,
                            const at::Tensor& result);

}  // namespace lockstep::kernels
