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

/// Inputs and what they should predict.
struct TokenBatch {
  at::Tensor tokens;  ///< [samples, seq_length] of int64
  at::Tensor labels;  ///< likewise, one token later
};

/// The same with what stands beside the tokens, on the host.
struct MarkedBatch {
  at::Tensor tokens, labels;  ///< as above
  at::Tensor loss;            ///< [samples, seq_length] of bool: whether the label counts
  at::Tensor positions;       ///< [seq_length, samples] of int64; undefined: 0, 1, ... in each
  at::Tensor padding;         ///< [seq_length, samples] of bool: what fills up; undefined: none
  /// For each sample the lengths of the documents that bound attention; null: none does.
  std::shared_ptr<const std::vector<std::vector<int64_t>>> documents;
};

/// Whether any sample has marks.
bool has_marks(std::span<const SampleMarks> marks);

/// The samples that lie in `ids`, seq_length + 1 each, with their marks. UsageError unless there
/// are as many marks, of this length.
MarkedBatch make_marked_batch(std::span<const int64_t> ids, std::span<const SampleMarks> marks,
                              int64_t seq_length);

/// The samples that lie in `ids`, seq_length + 1 each, on `device`. UsageError unless that comes
/// out even.
TokenBatch make_token_batch(std::span<const int64_t> ids, int64_t seq_length, c10::Device device);

/// The windows of `text` that start at `starts`, on `device`. Errors as of TokenSequence::read().
TokenBatch make_token_batch(const TokenSequence& text, const std::vector<int64_t>& starts,
                            int64_t seq_length, c10::Device device);

}  // namespace lockstep
