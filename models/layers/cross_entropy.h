#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep {

/// -log softmax(logits)[label] for each token, in nats. `logits` [tokens, vocabulary], `labels`
/// [tokens] of int64 in 0 ... vocabulary - 1 -> [tokens], in fp32, or fp64 for fp64 logits. No
/// reduction: the sum over tokens and their number belong to the caller.
at::Tensor token_cross_entropy(const at::Tensor& logits, const at::Tensor& labels);

}  // namespace lockstep
