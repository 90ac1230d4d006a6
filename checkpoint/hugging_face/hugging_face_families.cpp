#include "lockstep/checkpoint/hugging_face_families.h"

#include <algorithm>
#include <array>
#include <optional>

#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/core/expert_rules.h"

namespace lockstep {
namespace {

using Info = HuggingFaceFamilyInfo;
using enum HuggingFaceFamily;

constexpr std::array kFamilies = {
    Info{.family = gpt2, .model_type = "gpt2", .architecture = "GPT2LMHeadModel", .name = "GPT-2"},
    Info{.family = llama,
         .model_type = "llama",
         .architecture = "LlamaForCausalLM",
         .name = "Llama"},
    Info{.family = mistral,
         .model_type = "mistral",
         .architecture = "MistralForCausalLM",
         .name = "Mistral",
         .window = true,
         .key_value_heads = 8},
    Info{.family = qwen2,
         .model_type = "qwen2",
         .architecture = "Qwen2ForCausalLM",
         .name = "Qwen2",
         .qkv_bias = true,
         .window = true,
         .key_value_heads = 32},
    Info{.family = qwen3,
         .model_type = "qwen3",
         .architecture = "Qwen3ForCausalLM",
         .name = "Qwen3",
         .qk_norm = true,
         .window = true,
         .key_value_heads = 32,
         .head_dim = 128},
    Info{.family = mixtral,
         .model_type = "mixtral",
         .architecture = "MixtralForCausalLM",
         .name = "Mixtral",
         .window = true,
         .experts = true,
         .key_value_heads = 8,
         .rope_theta = 1e6,
         .rms_norm_eps = 1e-5},
    Info{.family = qwen3_moe,
         .model_type = "qwen3_moe",
         .architecture = "Qwen3MoeForCausalLM",
         .name = "Qwen3-MoE",
         .qk_norm = true,
         .window = true,
         .experts = true,
         .key_value_heads = 4},
    Info{.family = deepseek_v3,
         .model_type = "deepseek_v3",
         .architecture = "DeepseekV3ForCausalLM",
         .name = "DeepSeek-V3",
         .experts = true,
         .key_value_heads = 128}};

template <class Value>
void expect(const char* field, const Value& found, const Value& allowed, const char* family) {
  require<ConfigError>(found == allowed, "model.{}: found {}, allowed in a {} model: {}", field,
                       found, family, allowed);
}

template <class Value>
void expect_unset(const char* field, const std::optional<Value>& found, const char* family) {
  require<ConfigError>(!found, "model.{}: found {}, allowed in a {} model: unset", field,
                       found.value_or(Value()), family);
}

void check_gpt2(const TransformerConfig& model) {
  const char* const family = family_info(gpt2).name;
  expect_unset("num_experts", model.num_experts, family);
  expect_unset("window_size", model.window_size, family);
  expect("qk_layernorm", model.qk_layernorm, false, family);
  expect<std::string>("normalization", to_string(model.normalization), "LayerNorm", family);
  require<ConfigError>(model.activation != Activation::swiglu,
                       "model.activation: found {}, allowed in a {} model: gelu, gelu_tanh",
                       to_string(model.activation), family);
  expect("add_bias_linear", model.add_bias_linear, true, family);
  expect("num_query_groups", *model.num_query_groups, model.num_attention_heads, family);
  expect("kv_channels", *model.kv_channels, model.hidden_size / model.num_attention_heads, family);
  expect("hidden_size", model.hidden_size, *model.kv_channels * model.num_attention_heads, family);
}

/// LlamaConfig refuses other widths; MistralConfig takes any.
bool fits_llama(const TransformerConfig& model) {
  return model.hidden_size % model.num_attention_heads == 0;
}

HuggingFaceFamily rotary_family(const TransformerConfig& model) {
  if (model.multi_latent_attention) return deepseek_v3;
  if (model.num_experts) return model.qk_layernorm ? qwen3_moe : mixtral;
  if (model.qk_layernorm) return qwen3;
  if (model.add_qkv_bias) return qwen2;
  return model.window_size || !fits_llama(model) ? mistral : llama;
}

/// transformers chooses the groups with the largest sum of two scores.
void check_deepseek_router(const TransformerConfig& model, const Info& info) {
  expect<std::string>("moe_router_score_function", to_string(model.moe_router_score_function),
                      "sigmoid", info.name);
  expect("moe_router_enable_expert_bias", model.moe_router_enable_expert_bias, true, info.name);
  expect_unset("moe_expert_capacity_factor", model.moe_expert_capacity_factor, info.name);
  if (model.moe_router_num_groups)
    expect("moe_router_topk", model.moe_router_topk, 2 * *model.moe_router_group_topk, info.name);
}

void check_deepseek(const TransformerConfig& model, const Info& info) {
  expect("qk_layernorm", model.qk_layernorm, true, info.name);
  expect("layernorm_epsilon", model.layernorm_epsilon, 1e-6, info.name);
  expect_unset("window_size", model.window_size, info.name);
  require<ConfigError>(model.num_experts.has_value(),
                       "model.num_experts: is not set, allowed in a {} model: set", info.name);
  check_deepseek_router(model, info);
  const int64_t shared = model.moe_shared_expert_intermediate_size.value_or(0);
  require<ConfigError>(shared > 0 && shared % *model.moe_ffn_hidden_size == 0,
                       "model.moe_shared_expert_intermediate_size: found {}, allowed in a {} "
                       "model: a multiple of model.moe_ffn_hidden_size ({})",
                       shared, info.name, *model.moe_ffn_hidden_size);
  for (int64_t layer = 1; layer < model.num_layers; ++layer)
    require<ConfigError>(has_experts(model, layer) || !has_experts(model, layer - 1),
                         "model.moe_layer_freq: layer {} is dense but follows one with "
                         "experts, allowed "
                         "in a {} model: dense layers first",
                         layer, info.name);
}

void check_experts_of(const TransformerConfig& model, const Info& info) {
  expect<std::string>("moe_router_score_function", to_string(model.moe_router_score_function),
                      "softmax", info.name);
  expect_unset("moe_shared_expert_intermediate_size", model.moe_shared_expert_intermediate_size,
               info.name);
  expect_unset("moe_router_num_groups", model.moe_router_num_groups, info.name);
  expect_unset("moe_router_topk_scaling_factor", model.moe_router_topk_scaling_factor, info.name);
  expect_unset("moe_expert_capacity_factor", model.moe_expert_capacity_factor, info.name);
  if (info.family != mixtral) return;
  expect("moe_router_pre_softmax", model.moe_router_pre_softmax, false, info.name);
  for (int64_t layer = 0; layer < model.num_layers; ++layer)
    require<ConfigError>(has_experts(model, layer),
                         "model.moe_layer_freq: layer {} is dense, allowed in a {} model: experts "
                         "in all layers",
                         layer, info.name);
}

void check_rotary_family(const TransformerConfig& model, const Info& info) {
  expect<std::string>("normalization", to_string(model.normalization), "RMSNorm", info.name);
  expect<std::string>("activation", to_string(model.activation), "swiglu", info.name);
  require<ConfigError>(info.family != mistral || model.window_size || !model.add_bias_linear,
                       "model.add_bias_linear: found true, which needs a Llama model, whose "
                       "model.hidden_size ({}) is a multiple of model.num_attention_heads ({})",
                       model.hidden_size, model.num_attention_heads);
  if (info.family != llama) expect("add_bias_linear", model.add_bias_linear, false, info.name);
  expect("add_qkv_bias", model.add_qkv_bias, info.qkv_bias, info.name);
  expect("rotary_percent", model.rotary_percent, 1.0, info.name);
  if (info.family == deepseek_v3) return check_deepseek(model, info);
  expect("rope_mscale_all_dim", model.rope_mscale_all_dim, 0.0, info.name);
  if (info.experts) check_experts_of(model, info);
}

}  // namespace

const HuggingFaceFamilyInfo& family_info(HuggingFaceFamily family) {
  return *std::find_if(kFamilies.begin(), kFamilies.end(),
                       [&](const Info& info) { return info.family == family; });
}

const HuggingFaceFamilyInfo* find_family(const std::string& model_type) {
  for (const Info& info : kFamilies)
    if (model_type == info.model_type) return &info;
  return nullptr;
}

std::string hugging_face_model_types() {
  std::string list;
  for (const Info& info : kFamilies)
    list += (list.empty() ? "" : ", ") + std::string(info.model_type);
  return list;
}

HuggingFaceFamily hugging_face_family(const TransformerConfig& model) {
  switch (model.position_embedding_type) {
    case PositionEmbeddingType::learned_absolute:
      check_gpt2(model);
      return gpt2;
    case PositionEmbeddingType::rope:
      check_rotary_family(model, family_info(rotary_family(model)));
      return rotary_family(model);
    case PositionEmbeddingType::none:
      break;
  }
  fail<ConfigError>(
      "model.position_embedding_type: found {}, allowed: learned_absolute (GPT-2), "
      "rope (Llama and the others)",
      to_string(model.position_embedding_type));
}

}  // namespace lockstep
