#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/models/layer_context.h"

namespace lockstep {

/// How heads of latent attention are made from the outputs of its linear layers.
struct LatentHeadSizes {
  int64_t fixed;    ///< channels of a query and key head without positions
  int64_t rotated;  ///< channels that are rotated, after them
  int64_t value;    ///< channels of a value head
  int64_t width;    ///< channels of the heads that are made, filled up with zeros
  double scale;     ///< of the queries
};

/// Queries, keys and values of latent attention in the shapes of CoreAttention, all with
/// latent_head_channels(). One operation of autograd, which keeps none of its inputs; computed in
/// fp32, or in fp64 for fp64, and rounded once. Queries include attention_logit_factor() and make
/// up for the core, which scales by the width and would scale too much.
class LatentHeads {
 public:
  explicit LatentHeads(const LayerContext& context);

  /// `query` [sequence, batch, heads * (fixed + rotated)], `key_value` [sequence, batch, heads *
  /// (fixed + value)], `shared_key` [sequence, batch, rotated], which all heads have ->
  /// {query, key, value}, each [sequence, batch, heads, width]. `positions` [sequence] or
  /// [sequence, batch] of int64, each < seq_length; undefined: 0 ... sequence - 1. UsageError: a
  /// longer sequence; backward with create_graph.
  std::vector<at::Tensor> forward(const at::Tensor& query, const at::Tensor& key_value,
                                  const at::Tensor& shared_key, const at::Tensor& positions) const;

 private:
  LatentHeadSizes sizes_;
  at::Tensor cos_;  ///< [seq_length, rotated / 2]
  at::Tensor sin_;
};

}  // namespace lockstep
