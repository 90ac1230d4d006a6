#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "lockstep/datasets/sample_source.h"
#include "lockstep/datasets/token_sequence.h"

namespace lockstep {

/// Inputs, and the tokens that they should predict.
struct TokenBatch {
  at::Tensor tokens;  ///< [samples, seq_length] of int64
  at::Tensor labels;  ///< likewise, one token later
};

/// The same together with the marks of the tokens, on the host.
struct MarkedBatch {
  at::Tensor tokens, labels;  ///< as above
  at::Tensor loss;            ///< [samples, seq_length] of bool: whether the label counts
  at::Tensor positions;       ///< [seq_length, samples] of int64; undefined: 0, 1, ... in each
  at::Tensor padding;         ///< [seq_length, samples] of bool: padding tokens; undefined: none
  /// For each sample the lengths of the documents that bound attention; null: none does.
  std::shared_ptr<const std::vector<std::vector<int64_t>>> documents;
};

/// Whether any sample has marks.
bool has_marks(std::span<const SampleMarks> marks);

/// The samples in `ids`, seq_length + 1 tokens each, with their marks. UsageError unless there are
/// as many marks as samples, of this length.
MarkedBatch make_marked_batch(std::span<const int64_t> ids, std::span<const SampleMarks> marks,
                              int64_t seq_length);

/// The samples in `ids`, seq_length + 1 tokens each, on `device`. UsageError unless `ids` holds a
/// whole number of samples.
TokenBatch make_token_batch(std::span<const int64_t> ids, int64_t seq_length, c10::Device device);

/// The windows of `text` that start at `starts`, on `device`. Errors as for TokenSequence::read().
TokenBatch make_token_batch(const TokenSequence& text, const std::vector<int64_t>& starts,
                            int64_t seq_length, c10::Device device);

}  // namespace lockstep
