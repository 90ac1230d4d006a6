#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

#include "lockstep/kernels/rotary.h"
#include "lockstep/models/layer_context.h"

namespace lockstep {

/// The angles by which one position turns the pairs of `rotated` channels: [rotated / 2] of fp64,
/// base^(-2i/rotated), stretched as rope_scaling_type says. llama3: a frequency f, of which the
/// original context holds n = f * original / 2 pi waves, becomes f / factor if n <= low, stays f if
/// n >= high, and in between changes from one to the other linearly in n, as in Llama 3.1. yarn:
/// pairs up to the one that turns rope_beta_fast times over the original context (rounded down)
/// keep their frequency, those from rope_beta_slow turns (rounded up) on have f / factor, and in
/// between it changes from one to the other linearly in the pair's number (Peng et al., "YaRN",
/// 2023).
at::Tensor rotary_frequencies(const TransformerConfig& config, int64_t rotated);

/// Rotary position embedding (Su et al., "RoFormer", 2021) in the form of Llama and Megatron Core:
/// channel i and channel i + d/2 form a pair that is rotated by position * base^(-2i/d), where d =
/// rotated_channels() are rotated and the others pass through. For scaled frequencies see
/// rotary_frequencies(). Cosines and sines are multiplied by rotary_amplitude().
class RotaryEmbedding {
 public:
  /// Tables for positions 0 ... seq_length - 1, computed in fp64, kept in fp32, or fp64 for fp64.
  explicit RotaryEmbedding(const LayerContext& context);

  /// Heads out of `packed` [sequence, batch, groups, heads + 2, kv_channels], the output of
  /// linear_qkv, as rotate_heads() says. `positions` [sequence] or [sequence, batch] of int64, each
  /// < seq_length; undefined: 0 ... sequence - 1. Backward with create_graph is a UsageError.
  kernels::AttentionHeads heads_of(const at::Tensor& packed, const kernels::QueryRange& queries,
                                   const at::Tensor& positions = {}) const;

  /// The tables [seq_length, d / 2].
  const at::Tensor& cosines() const { return cos_; }
  const at::Tensor& sines() const { return sin_; }

 private:
  at::Tensor cos_;  ///< [seq_length, d / 2]
  at::Tensor sin_;  ///< likewise
};

/// That of `context`, or a new one.
std::shared_ptr<const RotaryEmbedding> rotary_of(const LayerContext& context);

}  // namespace lockstep
