#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep {

class KeyValueCache;

/// For each sequence of a micro-batch the lengths of its documents in tokens, >= 1, which add up to
/// the whole sequence, over all ranks of cp. Attention refuses others by UsageError.
using SequenceDocuments = std::vector<std::vector<int64_t>>;

/// Tokens that only fill sequences or micro-batches up. Routers leave them out of what they count,
/// of their losses and of the experts' capacity.
struct PaddingTokens {
  /// [sequence, batch] of bool, of the tokens that this rank holds before sequence parallelism cuts
  /// them. Undefined: there are none.
  at::Tensor map = {};
  /// How many there are on all ranks of cp.
  int64_t count = 0;
};

/// Where the tokens of a micro-batch are, in their sequences and among all samples of the run; and
/// what attention has kept of the tokens before them.
struct TokenPositions {
  /// [sequence] of int64, for the sequence that this rank holds before sequence parallelism cuts
  /// it. Undefined: 0, 1, ...
  at::Tensor positions = {};
  /// [sequence, batch] of int64, of the same tokens: where each is in its document. Rotary and
  /// learned positions use these; dropout uses `positions`. Undefined: `positions` applies.
  at::Tensor document_positions = {};
  /// A token sees tokens of its own document alone. Null: each sequence is one document.
  std::shared_ptr<const SequenceDocuments> documents = {};
  /// The tokens after the last document of a sequence, and those of sequences that do not count.
  PaddingTokens padding = {};
  /// Number of the first sequence of the micro-batch among all samples of the run; the others
  /// follow it. Dropout draws the same numbers for the same sample and position on every layout, so
  /// a training loop must keep counting: with the same number, every step drops the same elements.
  int64_t first_sample = 0;
  /// The same number as int64 [] on the device, for a pass that is recorded once and launched for
  /// many micro-batches. Undefined: first_sample applies.
  at::Tensor first_sample_on_device = {};
  /// Keys and values of the preceding tokens; attention adds those of the present ones. See
  /// key_value_cache.h. Null: these tokens are whole sequences.
  std::shared_ptr<KeyValueCache> cache = {};

  /// The positions that rotary and learned embeddings use.
  const at::Tensor& embedded() const {
    return document_positions.defined() ? document_positions : positions;
  }
  /// Whether attention ends anywhere inside a sequence.
  bool is_bounded() const {
    if (!documents) return false;
    for (const auto& lengths : *documents)
      if (lengths.size() > 1) return true;
    return false;
  }
};

}  // namespace lockstep
