#include "lockstep/models/layer_params.h"

#include <cmath>

#include "lockstep/core/attention_rules.h"
#include "lockstep/core/check.h"
#include "lockstep/core/expert_rules.h"
#include "lockstep/core/integers.h"
#include "lockstep/core/tensor_parallel_rules.h"

namespace lockstep {
namespace {

ParamDescription cut_over_tp(size_t dim) {
  return {.placements = {{MeshAxis::tp, Shard{static_cast<int64_t>(dim)}}}};
}

ParamDescription with_gradient_over_tp(GradientState state) {
  return {.gradient_states = {{MeshAxis::tp, state}}};
}

ParamDescription as_matrix(ParamDescription description) {
  description.update = ParamUpdate::matrix;
  return description;
}

ParamDescription without_decay(ParamDescription description) {
  description.apply_weight_decay = false;
  return description;
}

/// The rows of a feed-forward network's first layer: with SwiGLU those of the gate and the others.
std::vector<int64_t> inner_rows(const TransformerConfig& config, int64_t width) {
  if (config.activation == Activation::swiglu) return {2, width};
  return {width};
}

}  // namespace

double output_layer_init_std(const TransformerConfig& config) {
  return config.init_method_std / std::sqrt(2.0 * static_cast<double>(config.num_layers));
}

ModuleSpec column_parallel_linear_params(int64_t in_features, std::vector<int64_t> out, bool bias,
                                         double init_std, std::vector<int64_t> rows_of_matrices) {
  require<UsageError>(!out.empty(),
                      "column_parallel_linear_params: out: found no sizes, allowed: {{rows}} or "
                      "{{blocks, rows}}");
  const ParamDescription cut = cut_over_tp(out.size() - 1);
  ParamDescription of_weight = as_matrix(cut);
  of_weight.rows_of_matrices = std::move(rows_of_matrices);
  std::vector<int64_t> shape = out;
  shape.push_back(in_features);
  ModuleSpec spec;
  spec.add({"weight", std::move(shape), NormalValues{init_std}, std::move(of_weight)});
  if (bias) spec.add({"bias", std::move(out), ConstantValue{0}, without_decay(cut)});
  return spec;
}

ModuleSpec row_parallel_linear_params(GradientState replicated, int64_t in_features,
                                      int64_t out_features, bool bias, double init_std) {
  ModuleSpec spec;
  spec.add(
      {"weight", {out_features, in_features}, NormalValues{init_std}, as_matrix(cut_over_tp(1))});
  if (bias)
    spec.add({"bias",
              {out_features},
              ConstantValue{0},
              without_decay(with_gradient_over_tp(replicated))});
  return spec;
}

ModuleSpec replicated_linear_params(GradientState replicated, int64_t in_features,
                                    int64_t out_features, double init_std) {
  ModuleSpec spec;
  spec.add({"weight",
            {out_features, in_features},
            NormalValues{init_std},
            as_matrix(with_gradient_over_tp(replicated))});
  return spec;
}

ModuleSpec norm_params(int64_t width, Normalization kind, GradientState replicated) {
  const ParamDescription description = without_decay(with_gradient_over_tp(replicated));
  ModuleSpec spec;
  spec.add({"weight", {width}, ConstantValue{1}, description});
  if (kind == Normalization::LayerNorm) spec.add({"bias", {width}, ConstantValue{0}, description});
  return spec;
}

ModuleSpec norm_params(const LayerSettings& settings) {
  return norm_params(settings.config.hidden_size, settings.config.normalization,
                     settings.replicated_gradient_state());
}

ModuleSpec vocab_parallel_embedding_params(int64_t vocab_size, int64_t rows, int64_t width,
                                           double init_std, TableUse use) {
  ParamDescription description = cut_over_tp(0);
  description.is_embedding_or_output = true;
  description.unpadded_rows = vocab_size;
  if (use == TableUse::other_stage)
    description.tie = Tie{"word_embeddings", TiedStages::first_and_last};
  ModuleSpec spec;
  spec.add({"weight", {rows, width}, NormalValues{init_std}, std::move(description)});
  return spec;
}

ModuleSpec vocab_parallel_embedding_params(const LayerSettings& settings, TableUse use) {
  const TransformerConfig& config = settings.config;
  const int64_t rows = padded_vocab_size(config, settings.tensor_ranks);
  return vocab_parallel_embedding_params(config.vocab_size, rows, config.hidden_size,
                                         config.init_method_std, use);
}

ModuleSpec position_embedding_params(const LayerSettings& settings) {
  const TransformerConfig& config = settings.config;
  ModuleSpec spec;
  spec.add({"weight",
            {config.seq_length, config.hidden_size},
            NormalValues{config.init_method_std},
            with_gradient_over_tp(settings.replicated_gradient_state())});
  return spec;
}

ModuleSpec language_model_embedding_params(const LayerSettings& settings, TableUse use) {
  ModuleSpec spec;
  spec.add_child("word_embeddings", vocab_parallel_embedding_params(settings, use));
  if (settings.config.position_embedding_type == PositionEmbeddingType::learned_absolute)
    spec.add_child("position_embeddings", position_embedding_params(settings));
  return spec;
}

ModuleSpec self_attention_params(const LayerSettings& settings) {
  const TransformerConfig& config = settings.config;
  const char* const what = "model.num_attention_heads and model.num_query_groups";
  const int64_t channels = *config.kv_channels;
  const int64_t heads =
      checked_add(config.num_attention_heads, checked_mul(2, *config.num_query_groups, what), what);
  const int64_t query_rows = checked_mul(config.num_attention_heads, channels, what);
  const int64_t queries_of_group = query_rows / *config.num_query_groups;
  ModuleSpec spec;
  spec.add_child("linear_qkv", column_parallel_linear_params(
                                   config.hidden_size, {checked_mul(heads, channels, what)},
                                   config.add_bias_linear || config.add_qkv_bias,
                                   config.init_method_std, {queries_of_group, channels, channels}));
  spec.add_child("linear_proj",
                 row_parallel_linear_params(settings.replicated_gradient_state(), query_rows,
                                            config.hidden_size, config.add_bias_linear,
                                            output_layer_init_std(config)));
  if (!config.qk_layernorm) return spec;
  for (const char* const name : {"q_layernorm", "k_layernorm"})
    spec.add_child(name, norm_params(channels, config.normalization, GradientState::partial_sum));
  return spec;
}

ModuleSpec latent_attention_params(const LayerSettings& settings) {
  const TransformerConfig& config = settings.config;
  const GradientState replicated = settings.replicated_gradient_state();
  const double std = config.init_method_std;
  const auto of_heads = [&config](int64_t channels) {
    return checked_mul(config.num_attention_heads, channels,
                       "model.num_attention_heads times channels");
  };
  const auto up = [&](int64_t in, int64_t channels) {
    return column_parallel_linear_params(in, {of_heads(channels)}, /*bias=*/false, std);
  };
  const auto down = [&](int64_t width) {
    return replicated_linear_params(replicated, config.hidden_size, width, std);
  };
  const auto norm = [&](int64_t width) {
    return norm_params(width, config.normalization, replicated);
  };
  ModuleSpec spec;
  if (const auto rank = config.q_lora_rank) {
    spec.add_child("linear_q_down_proj", down(*rank));
    spec.add_child("linear_q_up_proj", up(*rank, latent_query_channels(config)));
    if (config.qk_layernorm) spec.add_child("q_layernorm", norm(*rank));
  } else {
    spec.add_child("linear_q_proj", up(config.hidden_size, latent_query_channels(config)));
  }
  const int64_t rank = config.kv_lora_rank;
  spec.add_child("linear_kv_down_proj",
                 down(checked_add(rank, config.qk_pos_emb_head_dim, "model.kv_lora_rank")));
  spec.add_child("linear_kv_up_proj",
                 up(rank, checked_add(config.qk_head_dim, config.v_head_dim, "model.v_head_dim")));
  if (config.qk_layernorm) spec.add_child("kv_layernorm", norm(rank));
  spec.add_child("linear_proj", row_parallel_linear_params(
                                    replicated, of_heads(config.v_head_dim), config.hidden_size,
                                    /*bias=*/false, output_layer_init_std(config)));
  return spec;
}

ModuleSpec attention_params(const LayerSettings& settings) {
  return settings.config.multi_latent_attention ? latent_attention_params(settings)
                                                : self_attention_params(settings);
}

ModuleSpec mlp_params(const LayerSettings& settings, int64_t width) {
  const TransformerConfig& config = settings.config;
  ModuleSpec spec;
  spec.add_child("linear_fc1",
                 column_parallel_linear_params(config.hidden_size, inner_rows(config, width),
                                               config.add_bias_linear, config.init_method_std));
  spec.add_child("linear_fc2", row_parallel_linear_params(
                                   settings.replicated_gradient_state(), width, config.hidden_size,
                                   config.add_bias_linear, output_layer_init_std(config)));
  return spec;
}

ModuleSpec router_params(const LayerSettings& settings) {
  const TransformerConfig& config = settings.config;
  ModuleSpec spec;
  // Here the tokens are cut over tp with or without sequence parallelism.
  spec.add({"weight",
            {*config.num_experts, config.hidden_size},
            NormalValues{config.init_method_std},
            as_matrix(with_gradient_over_tp(GradientState::partial_sum))});
  return spec;
}

ModuleSpec expert_linear_params(const LayerSettings& settings, std::vector<int64_t> out, int64_t in,
                                ExpertCut cut, double init_std) {
  std::vector<int64_t> shape = {*settings.config.num_experts};
  shape.insert(shape.end(), out.begin(), out.end());
  const auto last_out = static_cast<int64_t>(shape.size()) - 1;
  const Shard along = {cut == ExpertCut::in ? last_out + 1 : last_out};
  const ParamDescription by_expert{.placements = {{MeshAxis::ep, Shard{0}}}, .is_expert = true};

  ParamDescription of_bias = without_decay(by_expert), of_weight = by_expert;
  of_weight.placements[MeshAxis::etp] = along;
  if (cut == ExpertCut::out)
    of_bias.placements[MeshAxis::etp] = along;
  else
    of_bias.gradient_states = {{MeshAxis::etp, GradientState::partial_sum}};

  std::vector<int64_t> weight_shape = shape;
  weight_shape.push_back(in);
  ModuleSpec spec;
  spec.add({"weight", std::move(weight_shape), NormalValues{init_std}, std::move(of_weight)});
  if (settings.config.add_bias_linear)
    spec.add({"bias", std::move(shape), ConstantValue{0}, std::move(of_bias)});
  return spec;
}

ModuleSpec grouped_mlp_params(const LayerSettings& settings) {
  const TransformerConfig& config = settings.config;
  const int64_t width = *config.moe_ffn_hidden_size;
  ModuleSpec spec;
  spec.add_child("linear_fc1",
                 expert_linear_params(settings, inner_rows(config, width), config.hidden_size,
                                      ExpertCut::out, config.init_method_std));
  spec.add_child("linear_fc2", expert_linear_params(settings, {config.hidden_size}, width,
                                                    ExpertCut::in, output_layer_init_std(config)));
  return spec;
}

ModuleSpec moe_layer_params(const LayerSettings& settings) {
  ModuleSpec spec;
  spec.add_child("router", router_params(settings));
  spec.add_child("experts", grouped_mlp_params(settings));
  if (const auto width = settings.config.moe_shared_expert_intermediate_size)
    spec.add_child("shared_experts", mlp_params(settings, *width));
  return spec;
}

ModuleSpec feed_forward_params(const LayerSettings& settings) {
  if (has_experts(settings.config, settings.layer)) return moe_layer_params(settings);
  return mlp_params(settings, *settings.config.ffn_hidden_size);
}

ModuleSpec transformer_layer_params(const LayerSettings& settings) {
  ModuleSpec spec;
  spec.add_child("input_layernorm", norm_params(settings));
  spec.add_child("self_attention", attention_params(settings));
  spec.add_child("pre_mlp_layernorm", norm_params(settings));
  spec.add_child("mlp", feed_forward_params(settings));
  return spec;
}

}  // namespace lockstep
