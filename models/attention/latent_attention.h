#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/models/attention.h"

namespace lockstep {

class LatentHeads;

/// Multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1): keys and values of
/// all heads are made from one vector of kv_lora_rank elements per token, queries from one of
/// q_lora_rank. Heads are cut over tp. Children, as in Megatron Core's MLASelfAttention, where n is
/// qk_head_dim, r qk_pos_emb_head_dim and v v_head_dim:
///
/// - `linear_q_down_proj`: replicated, weight [q_lora_rank, hidden_size]
/// - `linear_q_up_proj`: column-parallel, weight [heads * (n + r), q_lora_rank], head by head: the
///   channels without positions, then those that are rotated
/// - or, without q_lora_rank, `linear_q_proj`: column-parallel, weight [heads * (n + r),
///   hidden_size]
/// - `linear_kv_down_proj`: replicated, weight [kv_lora_rank + r, hidden_size]; its last r rows
///   make the rotated key channels, which all heads share
/// - `linear_kv_up_proj`: column-parallel, weight [heads * (n + v), kv_lora_rank], head by head:
///   its key's channels without positions, its value
/// - `linear_proj`: row-parallel, weight [hidden_size, heads * v]
/// - `q_layernorm`, `kv_layernorm`, with qk_layernorm: Norm of the compressed vectors
///
/// Rotated channels i and i + r / 2 form a pair, as in RotaryEmbedding. (DeepSeek and Megatron Core
/// pair 2 i and 2 i + 1: the same model with its rows in another order.)
///
/// Over tp each rank makes the compressed vectors of its tokens. In addition to the collectives of
/// the linear layers, without sequence parallelism an all-reduce in backward adds the gradients of
/// the shared key channels; with it, an all-gather brings the shared key channels of the whole
/// sequence, and a reduce-scatter their gradients.
class LatentAttention : public Attention {
 public:
  explicit LatentAttention(const LayerContext& context);
  /// `spec` as latent_attention_params() returns it.
  LatentAttention(const LayerContext& context, const ModuleSpec& spec);

  at::Tensor forward(const at::Tensor& hidden, const TokenPositions& tokens) const override;

 private:
  at::Tensor queries(const at::Tensor& hidden) const;
  /// {query, key, value} in the shapes of CoreAttention.
  std::vector<at::Tensor> heads_of(const at::Tensor& hidden, const TokenPositions& tokens) const;
  /// The shared key channels of all tokens, from those of this rank's tokens.
  at::Tensor shared_key(const at::Tensor& own) const;

  int64_t rank_;            ///< kv_lora_rank
  int64_t rotated_;         ///< qk_pos_emb_head_dim
  int64_t value_channels_;  ///< v_head_dim
  bool sequence_parallel_;
  ProcessGroup tensor_parallel_;
  std::string label_;
  std::shared_ptr<const LatentHeads> heads_;
  std::shared_ptr<ColumnParallelLinear> linear_q_proj_;   ///< null with q_lora_rank
  std::shared_ptr<ReplicatedLinear> linear_q_down_proj_;  ///< null without
  std::shared_ptr<ColumnParallelLinear> linear_q_up_proj_;
  std::shared_ptr<ReplicatedLinear> linear_kv_down_proj_;
  std::shared_ptr<ColumnParallelLinear> linear_kv_up_proj_;
  std::shared_ptr<RowParallelLinear> linear_proj_;
  std::shared_ptr<Norm> q_layernorm_;  ///< null without
  std::shared_ptr<Norm> kv_layernorm_;
};

}  // namespace lockstep
