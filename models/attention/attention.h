#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "lockstep/core/parameters.h"
#include "lockstep/models/hidden_check.h"
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

/// Which attention heads a tp rank has. If there are at least as many query groups as ranks, a rank
/// has whole groups. If there are fewer, `sharing` ranks share one group: each holds a part of the
/// group's rows of linear_qkv, gets the other ranks' features by an all-gather (whose backward is a
/// reduce-scatter), and continues with the group's key and value and its own query heads. So no
/// weight is duplicated, and every gradient is complete.
struct HeadLayout {
  int64_t groups = 0;           ///< on this rank
  int64_t heads_per_group = 0;  ///< query heads of a group, over all ranks
  int64_t sharing = 1;          ///< ranks that share a group
  int64_t own_heads = 0;        ///< query heads on this rank
  int64_t first_head = 0;       ///< the first of them, among those of all ranks
};

/// The layout of `rank` among `ranks`, a valid number of ranks (see check_tensor_parallel).
HeadLayout head_layout(const TransformerConfig& config, int64_t rank, int64_t ranks);

/// Self-attention of a transformer layer.
class Attention : public DescribedModule {
 public:
  /// `hidden` [sequence, batch, hidden_size], with sequence parallelism this rank's [sequence /
  /// ranks, ...] -> the same shape. With tokens.cache it also attends to the tokens in the cache:
  /// see KeyValueCache. UsageError: `hidden` of another shape or dtype (naming the layer);
  /// tokens.documents that are not those of each whole sequence, or beside a cache.
  virtual at::Tensor forward(const at::Tensor& hidden, const TokenPositions& tokens) const = 0;

 protected:
  /// `first_head`: this rank's first query head among those of all ranks of tp.
  Attention(const LayerContext& context, int64_t first_head);

  void check(const at::Tensor& hidden) const { check_(hidden); }

  /// The core's output for `heads`, {query, key, value} in the shapes of CoreAttention: [sequence,
  /// batch, heads * value_channels]; only the first `value_channels` of each head are taken.
  at::Tensor attend(const std::vector<at::Tensor>& heads, const TokenPositions& tokens,
                    int64_t value_channels) const;

 private:
  /// Attention for tokens that follow those in `cache`, to which they are added.
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
///   each key head, before rotation. The weights are replicated over tp; their gradients are terms
///   of a sum, because each rank has different query heads.
class SelfAttention : public Attention {
 public:
  explicit SelfAttention(const LayerContext& context);
  /// `spec` as self_attention_params() returns it.
  SelfAttention(const LayerContext& context, const ModuleSpec& spec);

  at::Tensor forward(const at::Tensor& hidden, const TokenPositions& tokens) const override;

 private:
  /// Query, key and value from linear_qkv, in the shapes of CoreAttention, rotated if the model
  /// uses rotary embedding.
  std::vector<at::Tensor> heads_of(const at::Tensor& hidden, const TokenPositions& tokens) const;
  std::vector<at::Tensor> rotated(const at::Tensor& packed, const kernels::QueryRange& queries,
                                  const TokenPositions& tokens) const;

  HeadLayout layout_;
  int64_t channels_;
  double logit_factor_;
  std::string label_;
  std::optional<ProcessGroup> sharing_;  ///< the ranks that share a group with this one
  std::shared_ptr<ColumnParallelLinear> linear_qkv_;
  std::shared_ptr<RowParallelLinear> linear_proj_;
  std::shared_ptr<Norm> q_layernorm_;  ///< null if unused
  std::shared_ptr<Norm> k_layernorm_;
  std::shared_ptr<const RotaryEmbedding> rotary_;  ///< null if unused
};

/// The attention that the configuration selects: SelfAttention or LatentAttention. `spec` as
/// attention_params() returns it.
std::shared_ptr<Attention> attention_from(const LayerContext& context, const ModuleSpec& spec);

}  // namespace lockstep
