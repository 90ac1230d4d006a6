#include "lockstep/planner/attention_plan.h"

#include <algorithm>

#include "lockstep/core/attention_rules.h"
#include "lockstep/core/context_parallel_rules.h"
#include "lockstep/planner/activation_plan.h"

namespace lockstep {
namespace {

using activation_bytes::product;
using activation_bytes::sum;

}  // namespace

ActivationSizes::ActivationSizes(const Config& config)
    : widths(local_widths(config)),
      sequence(div_exact(config.model.seq_length, config.parallel.context_parallel_size,
                         "model.seq_length", "parallel.context_parallel_size")),
      batch(config.train.micro_batch_size),
      tokens(product(sequence, batch)),
      own_tokens(config.parallel.sequence_parallel
                     ? tokens / config.parallel.tensor_model_parallel_size
                     : tokens),
      element(element_bytes(config.train.precision)),
      wide(std::max<int64_t>(element, 4)) {}

AttentionPlan::AttentionPlan(const Config& config, const ActivationSizes& sizes)
    : config_(config.model),
      parallel_(config.parallel),
      sizes_(sizes),
      bounded_(config.data.reset_attention_mask || config.train.task == TrainTask::sft),
      on_cuda_(config.train.device == DeviceChoice::cuda) {}

int64_t AttentionPlan::layer(int64_t number) const {
  return config_.multi_latent_attention ? latent_attention(number) : self_attention(number);
}

int64_t AttentionPlan::core(int64_t number) const {
  if (!is_cut()) return weights();
  if (!config_.multi_latent_attention)
    return sum(context(number, 0, query_bytes(), key_bytes()), weights());
  const int64_t heads = head_bytes();
  const bool copied = has_two_widths() && !transport(number).exchanges;
  return sum(context(number, 0, heads, heads), copied ? heads : 0, weights());
}

int64_t AttentionPlan::positions(const ModelChunk& chunk) const {
  using Type = PositionEmbeddingType;
  const Type type = config_.position_embedding_type;
  const bool embeds = type == Type::learned_absolute && chunk.has_embedding;
  const bool in_layers = type == Type::rope || config_.hidden_dropout > 0 ||
                         config_.recompute_granularity != RecomputeGranularity::none;
  const bool kept = embeds || (in_layers && chunk.num_layers > 0);
  return is_cut() && kept ? product(8, sizes_.sequence) : 0;
}

bool AttentionPlan::recomputes() const {
  return config_.recompute_granularity == RecomputeGranularity::selective;
}

AttentionPlan::Transport AttentionPlan::transport(int64_t number) const {
  const ContextCommunication communication = context_communication(config_, parallel_, number);
  if (communication == ContextCommunication::all_gather)
    return {.gathered = parallel_.context_parallel_size};
  if (communication == ContextCommunication::a2a) return {.exchanges = true};
  const std::vector<int64_t> levels = context_parallel_levels(parallel_);
  return {.exchanges = communication == ContextCommunication::a2a_p2p && !levels.empty() &&
                       levels.front() > 1};
}

/// What context_attention() keeps, without the log-sum-exp and its result: keys and values, and the
/// queries, which take `queries` bytes. An exchange packs all three, and its result differs from
/// what attention has computed. `query`, `key`: bytes of a rank's queries, and of its keys.
int64_t AttentionPlan::context(int64_t number, int64_t queries, int64_t query, int64_t key) const {
  const Transport by = transport(number);
  const int64_t kept = by.exchanges ? sum(query, product(2, key), query) : queries;
  return sum(kept, product(2, by.gathered, key));
}

/// For the fused operation the log-sum-exp; otherwise the mask, and the weights before and after
/// dropout.
int64_t AttentionPlan::weights() const {
  const int64_t rows = product(sizes_.tokens, sizes_.widths.heads);
  if (!drops()) return product(rows, sizes_.wide);
  return sum(product(bounded_ ? sizes_.batch : 1, sizes_.sequence, sizes_.sequence),
             product(rows, sizes_.sequence, sum(sizes_.wide, sizes_.element)));
}

int64_t AttentionPlan::query_bytes() const {
  return product(sizes_.tokens, sizes_.widths.heads, *config_.kv_channels, sizes_.element);
}
int64_t AttentionPlan::key_bytes() const {
  return product(sizes_.tokens, sizes_.widths.groups, *config_.kv_channels, sizes_.element);
}

/// Whether the queries lie in linear_qkv's output as they are used, head after head.
bool AttentionPlan::queries_are_views() const {
  return sizes_.widths.groups == 1 || sizes_.widths.groups == sizes_.widths.heads;
}

/// The memory that the norms of queries and keys keep in addition to linear_qkv's output, of which
/// their input is a view where possible.
int64_t AttentionPlan::query_key_norms() const {
  if (!config_.qk_layernorm) return 0;
  const int64_t rows = product(sizes_.tokens, sum(sizes_.widths.heads, sizes_.widths.groups));
  const bool centred = config_.normalization == Normalization::LayerNorm;
  return sum(queries_are_views() ? 0 : query_bytes(), product(centred ? 2 : 1, rows, sizes_.wide));
}

/// The output, which linear_proj keeps, is as large as the queries.
int64_t AttentionPlan::self_attention(int64_t number) const {
  const int64_t query = query_bytes(), key = key_bytes();
  const bool rotated = config_.position_embedding_type == PositionEmbeddingType::rope;
  const bool normed = config_.qk_layernorm, views = queries_are_views();
  const int64_t group_heads = config_.num_attention_heads / *config_.num_query_groups;
  const int64_t projected = product(key, sum(group_heads, 2));
  const int64_t kept = normed ? projected : 0;
  const int64_t own = normed ? sum(query, key) : views ? 0 : query;
  const int64_t heads = rotated ? sum(query, product(2, key), kept) : sum(projected, own);
  const int64_t output = query, norms = query_key_norms();
  if (recomputes()) return sum(heads, output, norms);
  const bool viewed = !rotated && !normed && views;
  const int64_t queries = viewed ? projected : query;
  if (is_cut()) return sum(context(number, queries, query, key), kept, output, norms, weights());
  const bool hides = bounded_ || (config_.window_size && *config_.window_size < sizes_.sequence);
  const bool windowed = hides && !drops();
  const bool copied = drops() || sizes_.element == sizes_.wide || !on_cuda_;
  const bool spread = (!views && copied) ||
                      (drops() && sizes_.batch > 1 && sizes_.widths.heads > sizes_.widths.groups);
  if (!windowed && !spread) return sum(heads, output, norms, weights());
  const int64_t copies = windowed ? sum(queries, product(2, key)) : product(3, query);
  return sum(copies, kept, output, norms, weights());
}

/// The memory kept for a compressed vector of `rank` elements per token, and for its norm.
int64_t AttentionPlan::latents(int64_t rank) const {
  const int64_t vectors = product(sizes_.own_tokens, rank, sizes_.element);
  if (!config_.qk_layernorm) return vectors;
  const bool centred = config_.normalization == Normalization::LayerNorm;
  return sum(product(2, vectors), product(centred ? 2 : 1, sizes_.own_tokens, sizes_.wide));
}

/// The queries, keys or values of latent attention.
int64_t AttentionPlan::head_bytes() const {
  return product(sizes_.tokens, sizes_.widths.heads, latent_head_channels(config_), sizes_.element);
}

/// Whether the fused operation's output is wider than that of latent attention.
bool AttentionPlan::has_two_widths() const {
  return !drops() && latent_head_channels(config_) != config_.v_head_dim;
}

/// The output of the fused operations is also kept in their width if values are narrower.
int64_t AttentionPlan::latent_attention(int64_t number) const {
  const int64_t heads = head_bytes();
  const int64_t output =
      product(sizes_.tokens, sizes_.widths.heads, config_.v_head_dim, sizes_.element);
  const int64_t vectors =
      sum(config_.q_lora_rank ? latents(*config_.q_lora_rank) : 0, latents(config_.kv_lora_rank));
  if (recomputes()) return sum(vectors, product(3, heads), output);
  const bool exchanges = is_cut() && transport(number).exchanges;
  const int64_t kept = is_cut() ? context(number, heads, heads, heads) : product(3, heads);
  return sum(vectors, kept, output, has_two_widths() && !exchanges ? heads : 0, weights());
}

}  // namespace lockstep
