#include "lockstep/checkpoint/hugging_face_names.h"

#include <fmt/format.h>

#include <utility>

#include "lockstep/checkpoint/hugging_face_families.h"
#include "lockstep/core/expert_rules.h"

namespace lockstep {
namespace {

using Names = std::vector<std::string>;
using Rules = std::vector<WeightRule>;
using Form = WeightForm;

void add_gpt2_layer(Rules& rules, const std::string& ours, const std::string& theirs) {
  for (const std::string part : {"weight", "bias"}) {
    const bool matrix = part == "weight";
    const Form linear = matrix ? Form::transposed : Form::same;
    rules.push_back({ours + "input_layernorm." + part, {theirs + "ln_1." + part}});
    rules.push_back({ours + "self_attention.linear_qkv." + part,
                     {theirs + "attn.c_attn." + part},
                     Form::fused_qkv});
    rules.push_back(
        {ours + "self_attention.linear_proj." + part, {theirs + "attn.c_proj." + part}, linear});
    rules.push_back({ours + "pre_mlp_layernorm." + part, {theirs + "ln_2." + part}});
    rules.push_back({ours + "mlp.linear_fc1." + part, {theirs + "mlp.c_fc." + part}, linear});
    rules.push_back({ours + "mlp.linear_fc2." + part, {theirs + "mlp.c_proj." + part}, linear});
  }
}

void add_attention(Rules& rules, const TransformerConfig& model, const std::string& ours,
                   const std::string& theirs) {
  for (const std::string part : {"weight", "bias"}) {
    if (part == "bias" && !model.add_qkv_bias && !model.add_bias_linear) continue;
    rules.push_back(
        {ours + "linear_qkv." + part,
         {theirs + "q_proj." + part, theirs + "k_proj." + part, theirs + "v_proj." + part},
         Form::separate_qkv});
  }
  rules.push_back({ours + "linear_proj.weight", {theirs + "o_proj.weight"}});
  if (model.add_bias_linear) rules.push_back({ours + "linear_proj.bias", {theirs + "o_proj.bias"}});
  if (!model.qk_layernorm) return;
  rules.push_back({ours + "q_layernorm.weight", {theirs + "q_norm.weight"}});
  rules.push_back({ours + "k_layernorm.weight", {theirs + "k_norm.weight"}});
}

void add_latent_attention(Rules& rules, const TransformerConfig& model, const std::string& ours,
                          const std::string& theirs) {
  const auto add = [&](const char* own, const char* their) {
    rules.push_back({ours + own + ".weight", {theirs + their + ".weight"}});
  };
  const auto add_pairs = [&](const char* own, const char* their, int64_t blocks) {
    rules.push_back({ours + own + ".weight",
                     {theirs + their + ".weight"},
                     Form::pairs,
                     blocks,
                     model.qk_pos_emb_head_dim});
  };
  const int64_t heads = model.num_attention_heads;
  if (model.q_lora_rank) {
    add("linear_q_down_proj", "q_a_proj");
    add_pairs("linear_q_up_proj", "q_b_proj", heads);
    add("q_layernorm", "q_a_layernorm");
  } else {
    add_pairs("linear_q_proj", "q_proj", heads);
  }
  add_pairs("linear_kv_down_proj", "kv_a_proj_with_mqa", 1);
  add("linear_kv_up_proj", "kv_b_proj");
  add("kv_layernorm", "kv_a_layernorm");
  add("linear_proj", "o_proj");
}

/// Names of the three matrices of a gated feed-forward network, or of an expert.
struct GatedNames {
  const char* gate;
  const char* up;
  const char* down;
};

void add_experts(Rules& rules, const TransformerConfig& model, const std::string& ours,
                 const std::string& theirs, const GatedNames& names) {
  Names first, second;
  for (int64_t expert = 0; expert < *model.num_experts; ++expert) {
    const std::string one = fmt::format("{}experts.{}.", theirs, expert);
    first.push_back(one + names.gate + ".weight");
    first.push_back(one + names.up + ".weight");
    second.push_back(one + names.down + ".weight");
  }
  rules.push_back({ours + "router.weight", {theirs + "gate.weight"}});
  rules.push_back({ours + "experts.linear_fc1.weight", std::move(first), Form::stacked});
  rules.push_back({ours + "experts.linear_fc2.weight", std::move(second), Form::stacked});
}

void add_gated_network(Rules& rules, bool biases, const std::string& ours,
                       const std::string& theirs) {
  rules.push_back({ours + "linear_fc1.weight",
                   {theirs + "gate_proj.weight", theirs + "up_proj.weight"},
                   Form::stacked});
  rules.push_back({ours + "linear_fc2.weight", {theirs + "down_proj.weight"}});
  if (!biases) return;
  rules.push_back(
      {ours + "linear_fc1.bias", {theirs + "gate_proj.bias", theirs + "up_proj.bias"}, Form::rows});
  rules.push_back({ours + "linear_fc2.bias", {theirs + "down_proj.bias"}});
}

void add_rotary_layer(Rules& rules, const TransformerConfig& model, int64_t layer,
                      const std::string& ours, const std::string& theirs) {
  constexpr GatedNames kProjections = {"gate_proj", "up_proj", "down_proj"};
  constexpr GatedNames kNumbers = {"w1", "w3", "w2"};
  rules.push_back({ours + "input_layernorm.weight", {theirs + "input_layernorm.weight"}});
  if (model.multi_latent_attention)
    add_latent_attention(rules, model, ours + "self_attention.", theirs + "self_attn.");
  else
    add_attention(rules, model, ours + "self_attention.", theirs + "self_attn.");
  rules.push_back(
      {ours + "pre_mlp_layernorm.weight", {theirs + "post_attention_layernorm.weight"}});
  const std::string mlp = theirs + "mlp.";
  if (!has_experts(model, layer)) {
    add_gated_network(rules, model.add_bias_linear, ours + "mlp.", mlp);
  } else if (hugging_face_family(model) == HuggingFaceFamily::mixtral) {
    add_experts(rules, model, ours + "mlp.", theirs + "block_sparse_moe.", kNumbers);
  } else {
    add_experts(rules, model, ours + "mlp.", mlp, kProjections);
    if (model.moe_router_enable_expert_bias)
      rules.push_back({expert_bias_name(layer), {mlp + "gate.e_score_correction_bias"}});
    if (model.moe_shared_expert_intermediate_size)
      add_gated_network(rules, /*biases=*/false, ours + "mlp.shared_experts.",
                        mlp + "shared_experts.");
  }
}

}  // namespace

std::string expert_bias_name(int64_t layer) {
  return fmt::format("decoder.layers.{}.mlp.router.expert_bias", layer);
}

Rules weight_rules(const TransformerConfig& model) {
  const bool gpt2 = hugging_face_family(model) == HuggingFaceFamily::gpt2;
  const std::string root = gpt2 ? "transformer." : "model.";
  Rules rules = {
      {"embedding.word_embeddings.weight", {root + (gpt2 ? "wte" : "embed_tokens") + ".weight"}},
      {"decoder.final_layernorm.weight", {root + (gpt2 ? "ln_f" : "norm") + ".weight"}}};
  if (gpt2) {
    rules.push_back({"embedding.position_embeddings.weight", {root + "wpe.weight"}});
    rules.push_back({"decoder.final_layernorm.bias", {root + "ln_f.bias"}});
  }
  if (model.untie_embeddings_and_output_weights)
    rules.push_back({"output_layer.weight", {"lm_head.weight"}});
  for (int64_t i = 0; i < model.num_layers; ++i) {
    const std::string ours = fmt::format("decoder.layers.{}.", i);
    if (gpt2)
      add_gpt2_layer(rules, ours, fmt::format("{}h.{}.", root, i));
    else
      add_rotary_layer(rules, model, i, ours, fmt::format("{}layers.{}.", root, i));
  }
  return rules;
}

}  // namespace lockstep
