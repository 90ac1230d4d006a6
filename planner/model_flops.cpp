#include "lockstep/planner/model_flops.h"

#include "lockstep/core/expert_rules.h"
#include "lockstep/core/tensor_parallel_rules.h"

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

}  // namespace

double model_flops_per_token(const Config& config) {
  const TransformerConfig& model = config.model;
  const auto hidden = static_cast<double>(model.hidden_size);
  const auto channels = static_cast<double>(*model.kv_channels);
  const double queries = static_cast<double>(model.num_attention_heads) * channels;
  const double keys = static_cast<double>(*model.num_query_groups) * channels;
  const auto layers = static_cast<double>(model.num_layers);
  const double attention = hidden * (queries + 2 * keys) + queries * hidden;
  const double visible = static_cast<double>(model.seq_length) / 2;
  double elements = layers * (attention + 2 * queries * visible);
  for (int64_t layer = 0; layer < model.num_layers; ++layer)
    elements += feed_forward_of_layer(model, layer);
  const int64_t rows = padded_vocab_size(model, config.parallel.tensor_model_parallel_size);
  elements += hidden * static_cast<double>(rows);
  return kForwardAndBackward * kMultiplyAndAdd * elements;
}

}  // namespace lockstep
