#include "lockstep/models/latent_attention.h"

#include <ATen/ATen.h>

#include "lockstep/models/latent_heads.h"
#include "lockstep/parallel_state/parallel_functions.h"

namespace lockstep {
namespace {

int64_t first_head_of(const LayerContext& context) {
  const ProcessGroup tp = context.tensor_parallel();
  return head_layout(context.config, tp.rank(), tp.size()).first_head;
}

}  // namespace

LatentAttention::LatentAttention(const LayerContext& context, const ModuleSpec& spec)
    : Attention(context, first_head_of(context)),
      rank_(context.config.kv_lora_rank),
      rotated_(context.config.qk_pos_emb_head_dim),
      value_channels_(context.config.v_head_dim),
      sequence_parallel_(context.parallel.sequence_parallel),
      tensor_parallel_(context.tensor_parallel()),
      label_(context.name + "shared key channels"),
      heads_(std::make_shared<const LatentHeads>(context)) {
  const bool normed = context.config.qk_layernorm;
  if (context.config.q_lora_rank) {
    linear_q_down_proj_ = add_child<ReplicatedLinear>(context, spec, "linear_q_down_proj");
    linear_q_up_proj_ = add_child<ColumnParallelLinear>(context, spec, "linear_q_up_proj");
    if (normed) q_layernorm_ = add_child<Norm>(context, spec, "q_layernorm");
  } else {
    linear_q_proj_ = add_child<ColumnParallelLinear>(context, spec, "linear_q_proj");
  }
  linear_kv_down_proj_ = add_child<ReplicatedLinear>(context, spec, "linear_kv_down_proj");
  linear_kv_up_proj_ = add_child<ColumnParallelLinear>(context, spec, "linear_kv_up_proj");
  if (normed) kv_layernorm_ = add_child<Norm>(context, spec, "kv_layernorm");
  linear_proj_ = add_child<RowParallelLinear>(context, spec, "linear_proj");
}

LatentAttention::LatentAttention(const LayerContext& context)
    : LatentAttention(context, latent_attention_params(context.settings())) {}

at::Tensor LatentAttention::queries(const at::Tensor& hidden) const {
  if (linear_q_proj_) return linear_q_proj_->forward(hidden);
  const at::Tensor latent = linear_q_down_proj_->forward(hidden);
  return linear_q_up_proj_->forward(q_layernorm_ ? q_layernorm_->forward(latent) : latent);
}

at::Tensor LatentAttention::shared_key(const at::Tensor& own) const {
  if (sequence_parallel_)
    return gather_from_group(own, tensor_parallel_, 0, GradientState::partial_sum, label_);
  return copy_to_group(own, tensor_parallel_, label_);
}

std::vector<at::Tensor> LatentAttention::heads_of(const at::Tensor& hidden,
                                                  const TokenPositions& tokens) const {
  const at::Tensor query = queries(hidden);
  const auto parts = linear_kv_down_proj_->forward(hidden).split_with_sizes({rank_, rotated_}, 2);
  const at::Tensor latent = parts[0].contiguous();
  const at::Tensor key_value =
      linear_kv_up_proj_->forward(kv_layernorm_ ? kv_layernorm_->forward(latent) : latent);
  return heads_->forward(query, key_value, shared_key(parts[1]), tokens.embedded());
}

at::Tensor LatentAttention::forward(const at::Tensor& hidden, const TokenPositions& tokens) const {
  check(hidden);
  return linear_proj_->forward(attend(heads_of(hidden, tokens), tokens, value_channels_));
}

}  // namespace lockstep
