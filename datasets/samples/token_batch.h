#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "lockstep/datasets/token_sequence.h"

namespace lockstep {

/// Inputs and what they should predict.
struct TokenBatch {
  at::Tensor tokens;  ///< [samples, seq_length] of int64
  at::Tensor labels;  ///< likewise, one token later
};

/// The samples that lie in `ids`, seq_length + 1 each, on `device`. UsageError unless that comes
/// out even.
TokenBatch make_token_batch(std::span<const int64_t> ids, int64_t seq_length, c10::Device device);

/// The windows of `text` that start at `starts`, on `device`. Errors as of TokenSequence::read().
TokenBatch make_token_batch(const TokenSequence& text, const std::vector<int64_t>& starts,
                            int64_t seq_length, c10::Device device);

}  // namespace lockstep
