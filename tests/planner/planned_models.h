#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/models/gpt_model.h"
#include "lockstep/training/run_setup.h"

/// Small models in many variants, whose memory is planned and then measured.
namespace lockstep::testing {

inline constexpr const char* kSmall = R"(
  model { num_layers: 3 hidden_size: 48 num_attention_heads: 4 ffn_hidden_size: 80 seq_length: 40
          vocab_size: 300 }
  train { micro_batch_size: 3 }
)";

inline Config small(const std::vector<std::string>& overrides) {
  return parse_config(kSmall, "small", overrides);
}

inline std::shared_ptr<GPTModel> model_of(const Config& config) {
  return std::make_shared<GPTModel>(
      config.model,
      GPTModelOptions{.dtype = parameter_dtype(config.train.precision), .lora = config.lora});
}

/// Latent attention with keys of 16 channels and values of 12, unless `more` says otherwise.
inline std::vector<std::string> latent(const std::vector<std::string>& more) {
  std::vector<std::string> all = {"model.multi_latent_attention=true", "model.kv_lora_rank=24",
                                  "model.qk_head_dim=10", "model.qk_pos_emb_head_dim=6",
                                  "model.v_head_dim=12"};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

inline const std::vector<std::vector<std::string>> kModels = {
    {},
    {"train.precision=fp64"},
    {"train.precision=bf16"},
    {"model.num_query_groups=2"},
    {"model.num_query_groups=1"},
    {"model.num_query_groups=2", "train.precision=bf16", "model.add_bias_linear=true"},
    {"model.num_query_groups=1", "model.position_embedding_type=none", "model.activation=gelu"},
    {"model.num_query_groups=2", "model.position_embedding_type=learned_absolute",
     "model.normalization=LayerNorm"},
    {"model.normalization=LayerNorm", "train.precision=bf16", "model.add_qkv_bias=true",
     "model.activation=gelu"},
    {"model.normalization=LayerNorm", "train.precision=fp64", "model.rotary_percent=0.5"},
    {"model.untie_embeddings_and_output_weights=true", "model.kv_channels=20"},
    {"train.micro_batch_size=1", "model.num_layers=1"},
    {"model.recompute_granularity=selective"},
    {"model.recompute_granularity=selective", "model.num_query_groups=2", "train.precision=bf16"},
    {"model.recompute_granularity=selective", "model.num_query_groups=2",
     "model.position_embedding_type=none"},
    {"model.recompute_granularity=full"},
    {"model.recompute_granularity=full", "model.recompute_num_layers=2", "train.precision=bf16"},
    {"model.recompute_granularity=full", "model.recompute_method=uniform",
     "model.recompute_num_layers=2"},
    {"model.label_smoothing=0.1", "model.make_vocab_size_divisible_by=128"},
    {"model.label_smoothing=0.1", "train.precision=bf16", "train.micro_batch_size=1"},
    {"model.hidden_size=64", "model.ffn_hidden_size=256", "model.vocab_size=700",
     "model.num_layers=5"},
    {"model.make_vocab_size_divisible_by=128"},
    {"model.cross_entropy_chunk_size=32"},
    {"model.cross_entropy_chunk_size=7", "train.precision=bf16", "model.label_smoothing=0.1"},
    {"model.cross_entropy_chunk_size=1000", "model.untie_embeddings_and_output_weights=true"},
    {"model.cross_entropy_chunk_size=32", "train.precision=fp64", "model.vocab_size=3000"},
    {"model.hidden_dropout=0.1"},
    {"model.hidden_dropout=0.1", "model.attention_dropout=0.1", "model.seq_length=200"},
    {"model.attention_dropout=0.1", "model.num_query_groups=1", "train.precision=bf16"},
    {"model.attention_dropout=0.1", "model.num_query_groups=1", "train.micro_batch_size=1"},
    {"model.attention_dropout=0.1", "model.num_query_groups=2",
     "model.recompute_granularity=selective"},
    {"model.attention_dropout=0.1", "model.num_query_groups=1",
     "model.position_embedding_type=none", "model.recompute_granularity=selective"},
    {"model.qk_layernorm=true"},
    {"model.qk_layernorm=true", "train.precision=bf16"},
    {"model.qk_layernorm=true", "model.num_query_groups=2"},
    {"model.qk_layernorm=true", "model.num_query_groups=2", "train.precision=bf16"},
    {"model.qk_layernorm=true", "model.num_query_groups=2",
     "model.recompute_granularity=selective"},
    {"model.qk_layernorm=true", "model.num_query_groups=1", "model.normalization=LayerNorm",
     "model.position_embedding_type=none"},
    {"model.window_size=9"},
    {"model.window_size=9", "model.num_query_groups=2", "train.precision=bf16"},
    {"model.window_size=9", "model.num_query_groups=2", "model.qk_layernorm=true"},
    {"model.window_size=9", "model.position_embedding_type=none"},
    {"model.window_size=9", "model.recompute_granularity=selective", "model.num_query_groups=2"},
    {"model.window_size=9", "model.attention_dropout=0.1"},
    {"model.rope_scaling_type=yarn", "model.rope_mscale_all_dim=1"},
    latent({}),
    latent({"train.precision=bf16", "model.q_lora_rank=20", "model.v_head_dim=16"}),
    latent({"train.precision=fp64", "model.q_lora_rank=20", "model.qk_layernorm=true",
            "model.v_head_dim=30"}),
    latent({"model.qk_layernorm=true", "model.normalization=LayerNorm"}),
    latent({"model.recompute_granularity=selective", "model.v_head_dim=16"}),
    latent({"model.recompute_granularity=selective", "model.qk_layernorm=true"}),
    latent({"model.recompute_granularity=full", "train.precision=bf16"}),
    latent({"model.window_size=9"}),
    latent({"model.attention_dropout=0.1", "model.qk_layernorm=true"}),
};

inline std::vector<std::string> with(std::vector<std::string> list,
                                     const std::vector<std::string>& more) {
  list.insert(list.end(), more.begin(), more.end());
  return list;
}

/// kModels and some with experts.
inline std::vector<std::vector<std::string>> all_models() {
  std::vector<std::vector<std::string>> models = kModels;
  for (const auto& overrides : std::vector<std::vector<std::string>>{
           {},
           {"train.precision=bf16", "model.moe_ffn_hidden_size=24", "model.moe_router_topk=3"},
           {"model.activation=gelu", "model.moe_layer_freq=2", "train.precision=fp64"},
           {"model.moe_layer_freq=[0, 1, 1]"},
           {"model.moe_shared_expert_intermediate_size=20", "model.add_bias_linear=true"},
           {"model.moe_router_score_function=sigmoid", "model.moe_aux_loss_coeff=0.1",
            "model.moe_z_loss_coeff=0.1"},
           {"model.moe_router_pre_softmax=true", "model.moe_router_topk=1",
            "model.moe_aux_loss_coeff=0.1", "model.moe_router_load_balancing_type=seq_aux_loss"},
           {"model.moe_expert_capacity_factor=1.5", "model.moe_pad_expert_input_to_capacity=true"},
           {"model.moe_expert_capacity_factor=1e30"},
           {"model.moe_token_dispatcher_type=allgather", "model.moe_router_topk_scaling_factor=2"},
           {"model.recompute_granularity=full", "model.recompute_num_layers=2"}})
    models.push_back(with({"model.num_experts=4"}, overrides));
  return models;
}

inline std::string text_of(const std::vector<std::string>& overrides) {
  return fmt::format("{}", fmt::join(overrides, " "));
}

}  // namespace lockstep::testing
