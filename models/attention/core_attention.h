#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

#include "lockstep/models/dropout.h"
#include "lockstep/models/layer_context.h"
#include "lockstep/models/token_positions.h"

namespace lockstep {

/// Causal attention of the heads that this rank of tp has, between linear_qkv and linear_proj; with
/// window_size each token sees only that many tokens, itself included, and with tokens.documents
/// only those of its own document.
class CoreAttention {
 public:
  virtual ~CoreAttention() = default;

  /// `query` [sequence, batch, heads, channels]; `key` and `value` likewise, with a number of heads
  /// that divides that of `query`: each of their heads serves heads / key-heads neighbouring query
  /// heads. -> [sequence, batch, heads * channels]. The same for the same arguments: it may be
  /// called again in backward. UsageError: tokens.documents that are not those of each sequence,
  /// over all ranks of cp.
  virtual at::Tensor forward(const at::Tensor& query, const at::Tensor& key,
                             const at::Tensor& value, const TokenPositions& tokens,
                             bool training) const = 0;
};

/// The attention that context.config and context.parallel ask for; over sequences that are cut over
/// cp it connects cp. `first_head` is this rank's first query head among those of all ranks of tp.
std::shared_ptr<const CoreAttention> make_core_attention(const LayerContext& context,
                                                         int64_t first_head);

/// softmax(q k^T / sqrt(channels)) v with a causal mask, in the shapes of CoreAttention.
at::Tensor causal_attention(const at::Tensor& query, const at::Tensor& key,
                            const at::Tensor& value);

}  // namespace lockstep
