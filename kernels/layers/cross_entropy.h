#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace lockstep::kernels {

/// The label of a token whose loss is 0 and which has no gradient.
inline constexpr int64_t kIgnoredToken = -100;

/// Which token ids the columns of the logits belong to: `held` columns have first, first + 1, ...;
/// the columns after them are padding.
struct TokenColumns {
  int64_t first = 0, held = 0;
};

/// Sums over the logits of tokens, in fp32, or fp64 for fp64 logits.
struct CrossEntropySums {
  at::Tensor highest;  ///< highest logit of each token: [tokens], -inf without columns
  /// [2, tokens], with label smoothing [3, tokens]: the label's logit, 0 if its column is not here;
  /// the sum of e^(logit - highest); the sum of the logits. The rows are contiguous.
  at::Tensor sums;
};

/// Allocates the sums of `tokens` tokens, for logits like `logits`.
CrossEntropySums make_cross_entropy_sums(int64_t tokens, const at::Tensor& logits, bool smoothed);

/// Writes into `sums` the sums of `logits` [tokens, width] of fp32, fp64, bf16 or fp16 with
/// `labels` [tokens] of int64, in one pass over memory (Milakov and Gimelshein, "Online normalizer
/// calculation for softmax", 2018). The same bits for any number of threads. The host does not wait
/// for a device. UsageError for another dtype.
void cross_entropy_sums(const at::Tensor& logits, const at::Tensor& labels,
                        const TokenColumns& columns, const CrossEntropySums& sums);

/// log(sum of exponentials) - (1 - share) (label's logit - highest) - share / vocab_size (sum of
/// logits - vocab_size highest), from sums over all `vocab_size` token ids; 0 for kIgnoredToken and
/// NaN for any other label outside the token ids -> [tokens]. `share` is the share of the mean over
/// all token ids in the target; it is above 0 if the sums are smoothed.
at::Tensor cross_entropy_losses(const CrossEntropySums& sums, const at::Tensor& labels,
                                int64_t vocab_size, double share);

/// Writes the gradient of the logits, computed from the gradients `grads` [tokens] of the losses,
/// into `result`, which may be `logits` if that is contiguous. Padding gets 0.
void cross_entropy_gradient(const at::Tensor& grads, const at::Tensor& logits,
                            const at::Tensor& labels, const TokenColumns& columns,
                            const CrossEntropySums& sums, int64_t vocab_size, double share,
                            const at::Tensor& result);

}  // namespace lockstep::kernels
