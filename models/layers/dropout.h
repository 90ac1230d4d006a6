#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>

#include "lockstep/models/layer_context.h"
#include "lockstep/models/token_positions.h"

namespace lockstep {

namespace kernels {
struct RandomPlaces;
}

/// Which part of its sequence a rank holds between the tensor-parallel regions: chunk `index` of
/// `count`, one chunk without sequence parallelism.
struct SequenceChunk {
  int64_t index = 0;
  int64_t count = 1;

  static SequenceChunk of(const ParallelContext& context);

  /// Positions of the chunk's `rows` tokens: [rows] of int64. Undefined if those of `tokens` are:
  /// then the first is index * rows, and the others follow.
  at::Tensor positions(const TokenPositions& tokens, int64_t rows, c10::Device device) const;
};

/// Dropout whose mask depends on (seed, layer's name, sample, position, channel) alone, by
/// Philox4x32-10 (philox.h): it is the same on every layout, when a layer is computed again in
/// backward, and on ranks that hold copies of the same activations, while ranks that hold different
/// ones draw different numbers. One pass (see kernels/dropout.h); backward draws the numbers again,
/// so none of them are kept.
class Dropout {
 public:
  /// `probability` in [0, 1): the share of elements that become zero; the others are divided by
  /// 1 - probability. The stream is that of context.name.
  Dropout(const LayerContext& context, double probability);
  /// The same for a layer that works on `chunk` of a rank's sequence.
  Dropout(const ParallelContext& context, double probability, const SequenceChunk& chunk);

  /// `x` [sequence, batch, hidden], with sequence parallelism this rank's [sequence / ranks, ...].
  /// Gives `x` itself if `training` is false or the probability is 0.
  at::Tensor apply(const at::Tensor& x, const TokenPositions& tokens, bool training) const;

  /// residual + apply(x), in the same pass.
  at::Tensor add(const at::Tensor& x, const at::Tensor& residual, const TokenPositions& tokens,
                 bool training) const;

  /// The same as apply() for `x` [sequence, batch, part] of the channels from `first` on.
  at::Tensor apply_to_channels(const at::Tensor& x, const TokenPositions& tokens, int64_t first,
                               bool training) const;

  /// The same for attention weights `x` [batch, heads, queries, keys], of which this rank has all
  /// keys and the heads from `first_head` on.
  at::Tensor apply_to_attention(const at::Tensor& x, const TokenPositions& tokens,
                                int64_t first_head, bool training) const;

 private:
  kernels::RandomPlaces places_of_tokens(const at::Tensor& x, const TokenPositions& tokens,
                                         int64_t first_channel) const;
  at::Tensor run(const at::Tensor& x, const std::optional<at::Tensor>& residual,
                 const TokenPositions& tokens, kernels::RandomPlaces places) const;

  double probability_;
  SequenceChunk chunk_;
  std::array<uint32_t, 2> key_;
};

}  // namespace lockstep
