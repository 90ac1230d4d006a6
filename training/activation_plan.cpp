#include "lockstep/training/activation_plan.h"

#include <algorithm>

#include "lockstep/core/integers.h"

namespace lockstep {
namespace {

template <class... Factors>
int64_t product(Factors... factors) {
  int64_t result = 1;
  ((result = checked_mul(result, factors, "bytes of activations")), ...);
  return result;
}

template <class... Terms>
int64_t sum(Terms... terms) {
  int64_t result = 0;
  ((result = checked_add(result, terms, "bytes of activations")), ...);
  return result;
}

/// The sizes of activation_plan.h.
class Activations {
 public:
  explicit Activations(const Config& config)
      : config_(config.model),
        widths_(local_widths(config)),
        sequence_(div_exact(config.model.seq_length, config.parallel.context_parallel_size,
                            "model.seq_length", "parallel.context_parallel_size")),
        batch_(config.train.micro_batch_size),
        tokens_(product(sequence_, batch_)),
        element_(element_bytes(config.train.precision)),
        wide_(std::max<int64_t>(element_, 4)) {}

  int64_t layer() const { return sum(norm(), attention(), norm(), feed_forward()); }
  int64_t layer_input() const { return product(tokens_, config_.hidden_size, element_); }

  int64_t embedding() const { return token_ids(); }
  int64_t output() const {
    return sum(norm(), product(tokens_, widths_.vocabulary, wide_), token_ids(),
               product(tokens_, wide_), wide_);
  }
  int64_t output_gradients() const { return product(2, tokens_, widths_.vocabulary, wide_); }

 private:
  /// Ids are turned into [sequence, batch], which is a copy if both are more than 1.
  int64_t token_ids() const { return sequence_ > 1 && batch_ > 1 ? product(tokens_, 8) : 0; }

  int64_t norm() const {
    const int64_t hidden = product(tokens_, config_.hidden_size);
    if (config_.normalization == Normalization::LayerNorm)
      return sum(product(2, hidden, element_), product(2, tokens_, element_));
    return sum(product(2, hidden, wide_), product(tokens_, wide_), product(hidden, element_));
  }

  int64_t attention() const {
    const int64_t query = product(tokens_, widths_.heads, *config_.kv_channels, element_);
    const int64_t key = product(tokens_, widths_.groups, *config_.kv_channels, element_);
    const bool rotated = config_.position_embedding_type == PositionEmbeddingType::rope;
    const bool recomputed = config_.recompute_granularity == RecomputeGranularity::selective;
    const bool views = widths_.groups == 1 || widths_.groups == widths_.heads;
    const int64_t own_query = rotated || !views ? query : 0;
    const int64_t own_key = rotated ? key : 0;
    const int64_t output = query;
    const int64_t projected = sum(query, key, key);
    if (recomputed) return sum(projected, own_query, own_key, output);
    const int64_t log_sum_exp = product(tokens_, widths_.heads, wide_);
    if (views) return sum(projected, own_query, own_key, output, log_sum_exp);
    return sum(product(3, query), output, log_sum_exp);
  }

  int64_t feed_forward() const {
    const bool gated = config_.activation == Activation::swiglu;
    return product(gated ? 4 : 2, tokens_, widths_.ffn, element_);
  }

  const TransformerConfig& config_;
  LocalWidths widths_;
  int64_t sequence_;
  int64_t batch_;
  int64_t tokens_;
  int64_t element_;
  int64_t wide_;
};

}  // namespace

int64_t element_bytes(Precision precision) {
  if (precision == Precision::fp64) return 8;
  return precision == Precision::fp32 ? 4 : 2;
}

ActivationPlan plan_activations(const Config& config, const ModelChunk& chunk,
                                int64_t first_layer) {
  const Activations activations(config);
  const int64_t recomputed = std::clamp<int64_t>(
      config.model.recompute_num_layers.value_or(0) - first_layer, 0, chunk.num_layers);
  ActivationPlan plan;
  plan.layers = sum(product(recomputed, activations.layer_input()),
                    product(chunk.num_layers - recomputed, activations.layer()));
  plan.ends = sum(chunk.has_embedding ? activations.embedding() : 0,
                  chunk.has_output ? activations.output() : 0);
  plan.working = std::max(chunk.has_output ? activations.output_gradients() : 0,
                          recomputed > 0 ? activations.layer() : 0);
  return plan;
}

int64_t rotary_table_bytes(const Config& config, const ModelChunk& chunk) {
  const TransformerConfig& model = config.model;
  if (model.position_embedding_type != PositionEmbeddingType::rope) return 0;
  const auto rotated =
      static_cast<int64_t>(static_cast<double>(*model.kv_channels) * model.rotary_percent);
  return product(2, chunk.num_layers, model.seq_length, rotated,
                 element_bytes(config.train.precision));
}

}  // namespace lockstep
