#pragma once

#include <memory>
#include <optional>

#include "lockstep/core/parameters.h"
#include "lockstep/models/layers/layer_context.h"
#include "lockstep/models/layers/linear.h"
#include "lockstep/models/layers/rotary_embedding.h"

namespace lockstep {

/// Causal self-attention with grouped queries (Ainslie et al., "GQA", 2023). Children:
///
/// - `linear_qkv`: weight [(num_attention_heads + 2 num_query_groups) * kv_channels, hidden_size].
///   Its rows come group by group: the query heads of the group, its key head, its value head, as
///   in Megatron Core.
/// - `linear_proj`: weight [hidden_size, num_attention_heads * kv_channels]
class SelfAttention : public DescribedModule {
 public:
  explicit SelfAttention(const LayerContext& context);

  /// `hidden` [sequence, batch, hidden_size] -> the same shape
  at::Tensor forward(const at::Tensor& hidden) const;

 private:
  int64_t groups_;
  int64_t heads_per_group_;
  int64_t channels_;
  bool recompute_core_;
  std::shared_ptr<Linear> linear_qkv_;
  std::shared_ptr<Linear> linear_proj_;
  std::optional<RotaryEmbedding> rotary_;
};

/// softmax(q k^T / sqrt(channels)) v with a causal mask. `query` [sequence, batch, heads,
/// channels]; `key` and `value` likewise with a divisor of the heads: each of their heads serves
/// heads / key-heads neighbouring query heads. -> [sequence, batch, heads * channels]
at::Tensor causal_attention(const at::Tensor& query, const at::Tensor& key,
                            const at::Tensor& value);

}  // namespace lockstep
