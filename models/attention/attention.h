#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "lockstep/core/parameters.h"
#include "lockstep/models/input_check.h"
#include "lockstep/models/layer_context.h"
#include "lockstep/models/linear.h"
#include "lockstep/models/normalization.h"
#include "lockstep/models/token_positions.h"

namespace lockstep {

namespace kernels {
struct QueryRange;
}

class CoreAttention;
class KeyValueCache;
class RotaryEmbedding;

/// How the heads of attention lie on a rank of tp. Where there are at least as many query groups as
/// ranks, a rank has whole groups. Where there are fewer, `sharing` ranks have one group together:
/// each has a part of its rows of linear_qkv, gets the others' features by an all-gather (whose
/// backward is a reduce-scatter), and goes on with the group's key and value and its own query
/// heads. So no weight is there twice, and every gradient is complete.
struct HeadLayout {
  int64_t groups = 0;           ///< on this rank
  int64_t heads_per_group = 0;  ///< query heads of a group, over all ranks
  int64_t sharing = 1;          ///< ranks that have a group together
  int64_t own_heads = 0;        ///< query heads on this rank
  int64_t first_head = 0;       ///< the first of them, among those of all ranks
};

/// `rank` of `ranks`, which fit (see check_tensor_parallel).
HeadLayout head_layout(const TransformerConfig& config, int64_t rank, int64_t ranks);

/// Self-attention of a transformer layer.
class Attention : public DescribedModule {
 public:
  /// `hidden` [sequence, batch, hidden_size], with sequence parallelism this rank's [sequence /
  /// ranks, ...] -> the same shape. With tokens.cache also attends to what that holds.
  /// UsageError, by the layer's name: `hidden` of another shape or dtype.
  virtual at::Tensor forward(const at::Tensor& hidden, const TokenPositions& tokens) const = 0;

 protected:
  /// `first_head`: this rank's first query head among those of all ranks of tp.
  Attention(const LayerContext& context, int64_t first_head);

  void check(const at::Tensor& hidden) const { check_(hidden); }

  /// The core's output for `heads`, {query, key, value} in the shapes of CoreAttention: [sequence,
  /// batch, heads * value_channels]; of each head its first `value_channels` are taken.
  at::Tensor attend(const std::vector<at::Tensor>& heads, const TokenPositions& tokens,
                    int64_t value_channels) const;

 private:
  /// Attention of the tokens behind those of `cache`, which it joins.
  at::Tensor attend_cached(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                           KeyValueCache& cache) const;

  HiddenCheck check_;
  std::optional<int64_t> window_;
  int64_t layer_;  ///< of the model
  bool recompute_core_;
  std::shared_ptr<const CoreAttention> core_;
};

/// Causal self-attention with grouped queries (Ainslie et al., "GQA", 2023), heads cut over tp.
/// Children:
///
/// - `linear_qkv`: column-parallel, weight [(num_attention_heads + 2 num_query_groups) *
///   kv_channels, hidden_size]. Its rows come group by group: the query heads of the group, its key
///   head, its value head, as in Megatron Core.
/// - `linear_proj`: row-parallel, weight [hidden_size, num_attention_heads * kv_channels]
/// - `q_layernorm`, `k_layernorm`, with qk_layernorm: Norm over the kv_channels of each query and
///   each key head, before they are rotated. The weights are on every rank of tp; their gradients
///   are terms of a sum, because each rank has other query heads.
class SelfAttention : public Attention {
 public:
  explicit SelfAttention(const LayerContext& context);
  /// `spec` as self_attention_params() states it.
  SelfAttention(const LayerContext& context, const ModuleSpec& spec);

  at::Tensor forward(const at::Tensor& hidden, const TokenPositions& tokens) const override;

 private:
  /// Query, key and value out of linear_qkv, in the shapes of CoreAttention, rotated if the model
  /// asks for it.
  std::vector<at::Tensor> heads_of(const at::Tensor& hidden, const TokenPositions& tokens) const;
  std::vector<at::Tensor> rotated(const at::Tensor& packed, const kernels::QueryRange& queries,
                                  const TokenPositions& tokens) const;

  HeadLayout layout_;
  int64_t channels_;
  double logit_factor_;
  std::string label_;
  std::optional<ProcessGroup> sharing_;  ///< the ranks that have a group with this one
  std::shared_ptr<ColumnParallelLinear> linear_qkv_;
  std::shared_ptr<RowParallelLinear> linear_proj_;
  std::shared_ptr<Norm> q_layernorm_;  ///< null without
  std::shared_ptr<Norm> k_layernorm_;
  std::shared_ptr<const RotaryEmbedding> rotary_;  ///< null without
};

/// The attention that the model has: SelfAttention or LatentAttention. `spec` as attention_params()
/// states it.
std::shared_ptr<Attention> attention_from(const LayerContext& context, const ModuleSpec& spec);

}  // namespace lockstep
