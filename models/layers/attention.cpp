#include "lockstep/models/layers/attention.h"

#include <ATen/ATen.h>

#include "lockstep/models/layers/recompute.h"

namespace lockstep {
namespace {

/// [sequence, batch, key-heads, channels] -> [batch, heads, sequence, channels]
at::Tensor spread_over_heads(const at::Tensor& heads, int64_t count) {
  const int64_t sequence = heads.size(0), batch = heads.size(1), channels = heads.size(3);
  const int64_t repeats = count / heads.size(2);
  const at::Tensor moved = heads.permute({1, 2, 0, 3});
  if (repeats == 1) return moved;
  return moved.unsqueeze(2)
      .expand({batch, heads.size(2), repeats, sequence, channels})
      .reshape({batch, count, sequence, channels});
}

}  // namespace

at::Tensor causal_attention(const at::Tensor& query, const at::Tensor& key,
                            const at::Tensor& value) {
  const int64_t heads = query.size(2);
  return at::scaled_dot_product_attention(query.permute({1, 2, 0, 3}),
                                          spread_over_heads(key, heads),
                                          spread_over_heads(value, heads), /*attn_mask=*/{},
                                          /*dropout_p=*/0.0, /*is_causal=*/true)
      .permute({2, 0, 1, 3})
      .flatten(2);
}

SelfAttention::SelfAttention(const LayerContext& context)
    : groups_(*context.config.num_query_groups),
      heads_per_group_(context.config.num_attention_heads / groups_),
      channels_(*context.config.kv_channels),
      recompute_core_(context.config.recompute_granularity == RecomputeGranularity::selective) {
  const TransformerConfig& config = context.config;
  linear_qkv_ = register_module(
      "linear_qkv", std::make_shared<Linear>(context.child("linear_qkv"), config.hidden_size,
                                             groups_ * (heads_per_group_ + 2) * channels_,
                                             config.add_bias_linear || config.add_qkv_bias,
                                             config.init_method_std));
  linear_proj_ = register_module(
      "linear_proj",
      std::make_shared<Linear>(context.child("linear_proj"), config.num_attention_heads * channels_,
                               config.hidden_size, config.add_bias_linear,
                               output_layer_init_std(config)));
  if (config.position_embedding_type == PositionEmbeddingType::rope) rotary_.emplace(context);
}

at::Tensor SelfAttention::forward(const at::Tensor& hidden) const {
  const int64_t sequence = hidden.size(0), batch = hidden.size(1);
  const auto parts = linear_qkv_->forward(hidden)
                         .view({sequence, batch, groups_, heads_per_group_ + 2, channels_})
                         .split_with_sizes({heads_per_group_, 1, 1}, 3);
  at::Tensor query = parts[0].reshape({sequence, batch, groups_ * heads_per_group_, channels_});
  at::Tensor key = parts[1].squeeze(3);
  const at::Tensor value = parts[2].squeeze(3);
  if (rotary_) {
    query = rotary_->apply(query);
    key = rotary_->apply(key);
  }
  const auto core = [](const std::vector<at::Tensor>& qkv) {
    return causal_attention(qkv[0], qkv[1], qkv[2]);
  };
  const std::vector<at::Tensor> qkv = {query, key, value};
  return linear_proj_->forward(recompute_core_ ? recompute(core, qkv) : core(qkv));
}

}  // namespace lockstep
