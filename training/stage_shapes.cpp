#include "lockstep/training/stage_shapes.h"

#include "lockstep/core/check.h"
#include "lockstep/core/expert_rules.h"
#include "lockstep/core/integers.h"
#include "lockstep/core/tensor_parallel_rules.h"
#include "lockstep/training/pipeline_plan.h"

namespace lockstep {
namespace {

/// Collects the parameters of modules.
class ShapeList {
 public:
  ShapeList(const Config& config)
      : model_(config.model),
        widths_(local_widths(config)),
        ranks_(config.parallel.tensor_model_parallel_size),
        expert_ranks_(config.parallel.expert_model_parallel_size),
        expert_tensor_ranks_(config.parallel.expert_tensor_parallel_size.value_or(ranks_)) {}

  void table(const std::string& name, int64_t rows, bool shared) {
    ParamDescription description;
    if (shared) description.tie = Tie{"word_embeddings"};
    list_.push_back({name + ".weight", {rows, model_.hidden_size}, description});
  }

  void norm(const std::string& name) {
    list_.push_back({name + ".weight", {model_.hidden_size}});
    if (model_.normalization == Normalization::LayerNorm)
      list_.push_back({name + ".bias", {model_.hidden_size}});
  }

  void linear(const std::string& name, std::vector<int64_t> rows, int64_t columns, bool bias) {
    std::vector<int64_t> shape = rows;
    shape.push_back(columns);
    const auto add = [&](const char* of, std::vector<int64_t> size) {
      const auto update = size.size() >= 2 ? ParamUpdate::matrix : ParamUpdate::elementwise;
      list_.push_back({name + of, std::move(size), {.update = update}});
    };
    add(".weight", std::move(shape));
    if (bias) add(".bias", std::move(rows));
  }

  void experts(const std::string& name) {
    const int64_t hidden = model_.hidden_size, experts = *model_.num_experts / expert_ranks_;
    const int64_t inner = *model_.moe_ffn_hidden_size / expert_tensor_ranks_;
    const bool gated = model_.activation == Activation::swiglu;
    const std::vector<int64_t> plain = {experts, inner}, gate_and_inner = {experts, 2, inner};
    linear(name + ".router", {*model_.num_experts}, hidden, false);
    const size_t first = list_.size();
    linear(name + ".experts.linear_fc1", gated ? gate_and_inner : plain, hidden,
           model_.add_bias_linear);
    linear(name + ".experts.linear_fc2", {experts, hidden}, inner, model_.add_bias_linear);
    for (size_t i = first; i < list_.size(); ++i) list_[i].description = {.is_expert = true};
    if (model_.moe_shared_expert_intermediate_size)
      feed_forward(name + ".shared_experts", *model_.moe_shared_expert_intermediate_size / ranks_);
  }

  void feed_forward(const std::string& name, int64_t width) {
    const bool gated = model_.activation == Activation::swiglu;
    const std::vector<int64_t> inner = {width}, gate_and_inner = {2, width};
    linear(name + ".linear_fc1", gated ? gate_and_inner : inner, model_.hidden_size,
           model_.add_bias_linear);
    linear(name + ".linear_fc2", {model_.hidden_size}, width, model_.add_bias_linear);
  }

  /// `number` counts over the whole model.
  void layer(const std::string& name, int64_t number) {
    const int64_t hidden = model_.hidden_size, channels = *model_.kv_channels;
    const bool bias = model_.add_bias_linear;
    norm(name + ".input_layernorm");
    const std::string what = "model.num_attention_heads and model.num_query_groups";
    const int64_t heads = checked_add(model_.num_attention_heads,
                                      checked_mul(2, *model_.num_query_groups, what), what);
    linear(name + ".self_attention.linear_qkv", {checked_mul(heads, channels, what) / ranks_},
           hidden, bias || model_.add_qkv_bias);
    linear(name + ".self_attention.linear_proj", {hidden}, widths_.heads * channels, bias);
    norm(name + ".pre_mlp_layernorm");
    if (has_experts(model_, number))
      experts(name + ".mlp");
    else
      feed_forward(name + ".mlp", widths_.ffn);
  }

  std::vector<ShapedParameter> take() { return std::move(list_); }

 private:
  const TransformerConfig& model_;
  LocalWidths widths_;
  int64_t ranks_;                ///< of tp
  int64_t expert_ranks_;         ///< of ep
  int64_t expert_tensor_ranks_;  ///< of expert-tp
  std::vector<ShapedParameter> list_;
};

int64_t divided(int64_t value, int64_t ranks, const char* field) {
  return div_exact(value, ranks, field, "parallel.tensor_model_parallel_size");
}

std::vector<ShapedParameter> whole_model(const Config& config) {
  Config whole = config;
  whole.parallel = {};
  return chunk_parameters(whole, chunks_of_stage(whole, /*stage=*/0).front());
}

}  // namespace

int64_t ShapedParameter::numel() const {
  int64_t numel = 1;
  for (const int64_t size : shape) numel = checked_mul(numel, size, "parameter '" + name + "'");
  return numel;
}

LocalWidths local_widths(const Config& config) {
  const TransformerConfig& model = config.model;
  const int64_t ranks = config.parallel.tensor_model_parallel_size;
  const int64_t groups = *model.num_query_groups;
  const bool shared_groups = groups < ranks && ranks % groups == 0;
  return {
      .heads = divided(model.num_attention_heads, ranks, "model.num_attention_heads"),
      .groups = shared_groups ? 1 : divided(groups, ranks, "model.num_query_groups"),
      .ffn = divided(*model.ffn_hidden_size, ranks, "model.ffn_hidden_size"),
      .vocabulary =
          padded_vocab_size(model.vocab_size, model.make_vocab_size_divisible_by, ranks) / ranks};
}

std::vector<ModelChunk> chunks_of_stage(const Config& config, int64_t stage) {
  const StageLayout layout = stage_layout(config);
  std::vector<ModelChunk> chunks;
  for (int64_t c = 0; c < layout.chunks(); ++c) {
    const LayerRange layers = layout.layers(stage, c);
    chunks.push_back({.first_layer = layers.begin,
                      .num_layers = layers.size(),
                      .has_embedding = layout.has_embedding(stage, c),
                      .has_output = layout.has_loss(stage, c)});
  }
  return chunks;
}

std::vector<ShapedParameter> chunk_parameters(const Config& config, const ModelChunk& chunk) {
  const TransformerConfig& model = config.model;
  const bool tied = !model.untie_embeddings_and_output_weights;
  const bool apart = config.parallel.pipeline_model_parallel_size > 1;
  const int64_t rows = local_widths(config).vocabulary;
  ShapeList list(config);
  if (chunk.has_embedding) {
    list.table("embedding.word_embeddings", rows, tied && apart);
    if (model.position_embedding_type == PositionEmbeddingType::learned_absolute)
      list.table("embedding.position_embeddings", model.seq_length, false);
  }
  for (int64_t i = 0; i < chunk.num_layers; ++i)
    list.layer("decoder.layers." + std::to_string(i), chunk.first_layer + i);
  if (chunk.has_output) {
    list.norm("decoder.final_layernorm");
    if (!tied || apart) list.table(tied ? "embedding.word_embeddings" : "output_layer", rows, tied);
  }
  return list.take();
}

int64_t num_parameters(const Config& config) {
  int64_t numel = 0;
  for (const ShapedParameter& param : whole_model(config))
    numel = checked_add(numel, param.numel(), "parameters");
  return numel;
}

int64_t num_active_parameters(const Config& config) {
  int64_t idle = 0;
  for (const ShapedParameter& param : whole_model(config))
    if (param.description.is_expert)
      idle += param.numel() / *config.model.num_experts *
              (*config.model.num_experts - config.model.moe_router_topk);
  return num_parameters(config) - idle;
}

}  // namespace lockstep
