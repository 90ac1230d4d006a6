#include "lockstep/planner/model_flops.h"

#include <algorithm>

#include "lockstep/core/expert_rules.h"
#include "lockstep/core/tensor_parallel_rules.h"
#include "lockstep/planner/stage_shapes.h"

namespace lockstep {
namespace {

constexpr double kForwardAndBackward = 3, kMultiplyAndAdd = 2;

/// Elements of the matrices of a feed-forward network of width `ffn`.
double feed_forward(const TransformerConfig& model, int64_t ffn) {
  const double matrices = model.activation == Activation::swiglu ? 3 : 2;
  return matrices * static_cast<double>(model.hidden_size) * static_cast<double>(ffn);
}

double feed_forward_of_layer(const TransformerConfig& model, int64_t layer) {
  if (!has_experts(model, layer)) return feed_forward(model, *model.ffn_hidden_size);
  return static_cast<double>(model.moe_router_topk) *
             feed_forward(model, *model.moe_ffn_hidden_size) +
         feed_forward(model, model.moe_shared_expert_intermediate_size.value_or(0));
}

/// Elements of the matrices of attention, and channels that its core multiplies for a pair of
/// tokens.
struct AttentionWork {
  double elements, channels;
};

AttentionWork latent_attention(const TransformerConfig& model) {
  const auto hidden = static_cast<double>(model.hidden_size);
  const auto heads = static_cast<double>(model.num_attention_heads);
  const double queries = heads * static_cast<double>(*model.kv_channels);
  const double values = heads * static_cast<double>(model.v_head_dim);
  const auto rank = static_cast<double>(model.kv_lora_rank);
  const double of_queries = model.q_lora_rank
                                ? static_cast<double>(*model.q_lora_rank) * (hidden + queries)
                                : hidden * queries;
  const double down = hidden * (rank + static_cast<double>(model.qk_pos_emb_head_dim));
  const double up = rank * (heads * static_cast<double>(model.qk_head_dim) + values);
  return {of_queries + down + up + values * hidden, queries + values};
}

AttentionWork attention(const TransformerConfig& model) {
  if (model.multi_latent_attention) return latent_attention(model);
  const auto hidden = static_cast<double>(model.hidden_size);
  const auto channels = static_cast<double>(*model.kv_channels);
  const double queries = static_cast<double>(model.num_attention_heads) * channels;
  const double keys = static_cast<double>(*model.num_query_groups) * channels;
  return {hidden * (queries + 2 * keys) + queries * hidden, 2 * queries};
}

}  // namespace

double visible_tokens(const TransformerConfig& model) {
  const auto length = static_cast<double>(model.seq_length);
  const double window =
      static_cast<double>(std::min(model.window_size.value_or(model.seq_length), model.seq_length));
  return window - window * window / (2 * length);
}

double model_flops_per_token(const Config& config) {
  const TransformerConfig& model = config.model;
  const auto hidden = static_cast<double>(model.hidden_size);
  const auto layers = static_cast<double>(model.num_layers);
  const AttentionWork work = attention(model);
  const double core = layers * work.channels * visible_tokens(model);
  double matrices = layers * work.elements;
  for (int64_t layer = 0; layer < model.num_layers; ++layer)
    matrices += feed_forward_of_layer(model, layer);
  const int64_t rows = padded_vocab_size(model, config.parallel.tensor_model_parallel_size);
  matrices += hidden * static_cast<double>(rows);
  if (!config.lora.rank) return kForwardAndBackward * kMultiplyAndAdd * (core + matrices);
  const double adapters = static_cast<double>(num_trained_parameters(config));
  return kMultiplyAndAdd *
         (kForwardAndBackward * (core + adapters) + (kForwardAndBackward - 1) * matrices);
}

}  // namespace lockstep
