#include "lockstep/models/attention.h"

#include <ATen/ATen.h>

#include "lockstep/core/attention_rules.h"
#include "lockstep/core/check.h"
#include "lockstep/models/core_attention.h"
#include "lockstep/models/key_value_cache.h"
#include "lockstep/models/latent_attention.h"
#include "lockstep/models/recompute.h"
#include "lockstep/models/rotary_embedding.h"
#include "lockstep/parallel_state/parallel_functions.h"

namespace lockstep {
namespace {

ProcessGroup group_that_shares(const LayerContext& context, int64_t sharing) {
  const ProcessGroup tp = context.tensor_parallel();
  const auto first = tp.ranks().begin() + tp.rank() / sharing * sharing;
  return context.state.group_of_ranks("tp-query-group", {first, first + sharing});
}

HeadLayout heads_of_rank(const LayerContext& context) {
  const ProcessGroup tp = context.tensor_parallel();
  return head_layout(context.config, tp.rank(), tp.size());
}

/// [..., heads * channels] of `heads` heads -> [..., heads * kept]
at::Tensor first_channels(const at::Tensor& x, int64_t heads, int64_t kept) {
  const int64_t channels = x.size(-1) / heads;
  if (kept == channels) return x;
  return x.unflatten(-1, {heads, channels}).narrow(-1, 0, kept).flatten(-2);
}

}  // namespace

HeadLayout head_layout(const TransformerConfig& config, int64_t rank, int64_t ranks) {
  const int64_t groups = *config.num_query_groups;
  const int64_t sharing = groups < ranks ? ranks / groups : 1;
  const int64_t own_heads = config.num_attention_heads / ranks;
  return {.groups = groups < ranks ? 1 : groups / ranks,
          .heads_per_group = config.num_attention_heads / groups,
          .sharing = sharing,
          .own_heads = own_heads,
          .first_head = own_heads * rank};
}

Attention::Attention(const LayerContext& context, int64_t first_head)
    : check_(context, "attention"),
      window_(context.config.window_size),
      layer_(context.layer),
      recompute_core_(context.config.recompute_granularity == RecomputeGranularity::selective),
      core_(make_core_attention(context, first_head)) {}

at::Tensor Attention::attend(const std::vector<at::Tensor>& heads, const TokenPositions& tokens,
                             int64_t value_channels) const {
  const int64_t count = heads[0].size(2);
  if (tokens.cache) {
    require<UsageError>(!tokens.documents,
                        "attention: documents: found some beside a cache, allowed: none");
    return first_channels(attend_cached(heads[0], heads[1], heads[2], *tokens.cache), count,
                          value_channels);
  }
  const auto core = [core = core_, tokens, training = is_training(), count,
                     value_channels](const std::vector<at::Tensor>& inputs) {
    return first_channels(core->forward(inputs[0], inputs[1], inputs[2], tokens, training), count,
                          value_channels);
  };
  return recompute_core_ ? recompute(core, heads) : core(heads);
}

at::Tensor Attention::attend_cached(const at::Tensor& query, const at::Tensor& key,
                                    const at::Tensor& value, KeyValueCache& cache) const {
  const auto [keys, values] = cache.append(layer_, key, value);
  if (cache.length() > 0) return cached_attention(query, keys, values, window_);
  return core_->forward(query, key, value, {}, /*training=*/false);
}

SelfAttention::SelfAttention(const LayerContext& context, const ModuleSpec& spec)
    : Attention(context, heads_of_rank(context).first_head),
      layout_(heads_of_rank(context)),
      channels_(*context.config.kv_channels),
      logit_factor_(attention_logit_factor(context.config)),
      label_(context.name + "query group") {
  if (layout_.sharing > 1) sharing_ = group_that_shares(context, layout_.sharing);
  linear_qkv_ = add_child<ColumnParallelLinear>(context, spec, "linear_qkv");
  linear_proj_ = add_child<RowParallelLinear>(context, spec, "linear_proj");
  if (context.config.position_embedding_type == PositionEmbeddingType::rope)
    rotary_ = rotary_of(context);
  if (!context.config.qk_layernorm) return;
  q_layernorm_ = add_child<Norm>(context, spec, "q_layernorm");
  k_layernorm_ = add_child<Norm>(context, spec, "k_layernorm");
}

SelfAttention::SelfAttention(const LayerContext& context)
    : SelfAttention(context, self_attention_params(context.settings())) {}

std::vector<at::Tensor> SelfAttention::heads_of(const at::Tensor& hidden,
                                                const TokenPositions& tokens) const {
  at::Tensor features = linear_qkv_->forward(hidden, tokens);
  if (sharing_)
    features = gather_from_group(features, *sharing_, 2, GradientState::partial_sum, label_);
  const int64_t sequence = features.size(0), batch = features.size(1);
  const int64_t heads = layout_.heads_per_group;
  const at::Tensor packed = features.view({sequence, batch, layout_.groups, heads + 2, channels_});
  const kernels::QueryRange own = {.first = sharing_ ? layout_.first_head % heads : 0,
                                   .count = sharing_ ? layout_.own_heads : heads};
  if (rotary_ && !q_layernorm_) return rotated(packed, own, tokens);
  const auto parts = packed.split_with_sizes({heads, 1, 1}, 3);
  at::Tensor query = parts[0].reshape({sequence, batch, layout_.groups * heads, channels_});
  if (sharing_) query = query.narrow(2, own.first, own.count);
  if (!q_layernorm_) return {query, parts[1].squeeze(3), parts[2].squeeze(3)};
  query = q_layernorm_->forward(query);
  const at::Tensor key = k_layernorm_->forward(parts[1].squeeze(3));
  if (!rotary_) return {query, key, parts[2].squeeze(3)};
  const at::Tensor queries = query.view({sequence, batch, layout_.groups, own.count, channels_});
  return rotated(at::cat({queries, key.unsqueeze(3), parts[2]}, 3), {0, own.count}, tokens);
}

std::vector<at::Tensor> SelfAttention::rotated(const at::Tensor& packed,
                                               const kernels::QueryRange& queries,
                                               const TokenPositions& tokens) const {
  const auto [query, key, value] = rotary_->heads_of(packed, queries, tokens.embedded());
  return {query, key, value};
}

at::Tensor SelfAttention::forward(const at::Tensor& hidden, const TokenPositions& tokens) const {
  check(hidden);
  std::vector<at::Tensor> heads = heads_of(hidden, tokens);
  if (logit_factor_ != 1) heads[0] = heads[0] * logit_factor_;
  return linear_proj_->forward(attend(heads, tokens, channels_), tokens);
}

std::shared_ptr<Attention> attention_from(const LayerContext& context, const ModuleSpec& spec) {
  if (context.config.multi_latent_attention)
    return std::make_shared<LatentAttention>(context, spec);
  return std::make_shared<SelfAttention>(context, spec);
}

}  // namespace lockstep
