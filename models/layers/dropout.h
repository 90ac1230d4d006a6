#pragma once

#include <array>
#include <cstdint>

#include <ATen/core/Tensor.h>

#include "lockstep/models/layer_context.h"
#include "lockstep/models/token_positions.h"

namespace lockstep {

/// Which part of a rank's sequence lies on it between the tensor-parallel regions: chunk `index` of
/// `count`, one chunk without sequence parallelism.
struct SequenceChunk {
  int64_t index = 0;
  int64_t count = 1;

  static SequenceChunk of(const ParallelContext& context);

  /// Positions of the chunk's `rows` tokens: [rows] of int64.
  at::Tensor positions(const TokenPositions& tokens, int64_t rows, c10::Device device) const;
};

/// Uniform random 32-bit integers by Philox4x32-10 (philox.h), as int64: a pure function of a
/// key and of where an element stands, computed with tensor operations on any device.
class RandomField {
 public:
  /// The field of `seed` and a name, such as a layer's.
  RandomField(uint64_t seed, const std::string& name);

  /// [positions, samples, count], on the device of `positions` [positions]; `lane` tells apart
  /// fields over the same elements. Element i is word i % 4 of block i / 4.
  at::Tensor words(const at::Tensor& positions, int64_t first_sample, int64_t samples,
                   int64_t count, int64_t lane = 0) const;
  /// The same for the samples with the numbers `samples` [samples].
  at::Tensor words(const at::Tensor& positions, const at::Tensor& samples, int64_t count,
                   int64_t lane) const;

 private:
  std::array<int64_t, 2> key_;
};

/// Dropout whose mask depends on (seed, layer's name, sample, position, channel) alone: it is the
/// same on every layout, when a layer is computed again in backward, and on ranks that hold copies
/// of the same activations, while ranks that hold different ones draw different numbers.
class Dropout {
 public:
  /// `probability` in [0, 1): the share of elements that becomes zero; the others are divided by
  /// 1 - probability. The stream is that of context.name.
  Dropout(const LayerContext& context, double probability);
  /// The same for a layer that works on `chunk` of a rank's sequence.
  Dropout(const ParallelContext& context, double probability, const SequenceChunk& chunk);

  /// `x` [sequence, batch, hidden], with sequence parallelism this rank's [sequence / ranks, ...].
  /// Gives `x` itself where `training` is false or the probability is 0.
  at::Tensor apply(const at::Tensor& x, const TokenPositions& tokens, bool training) const;

  /// The same for `x` [sequence, batch, part] of the channels from `first` on, of `channels`.
  at::Tensor apply_to_channels(const at::Tensor& x, const TokenPositions& tokens, int64_t first,
                               int64_t channels, bool training) const;

  /// The same for attention weights `x` [batch, heads, queries, keys], of which this rank has all
  /// keys and the heads from `first_head` on.
  at::Tensor apply_to_attention(const at::Tensor& x, const TokenPositions& tokens,
                                int64_t first_head, bool training) const;

 private:
  at::Tensor keep(const at::Tensor& x, const at::Tensor& words) const;

  double probability_;
  SequenceChunk chunk_;
  RandomField field_;
};

}  // namespace lockstep
