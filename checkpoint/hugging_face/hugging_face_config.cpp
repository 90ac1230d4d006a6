#include "lockstep/checkpoint/hugging_face_config.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

#include "lockstep/checkpoint/hugging_face_latents.h"
#include "lockstep/checkpoint/hugging_face_rope.h"
#include "lockstep/checkpoint/json_keys.h"
#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/core/expert_rules.h"
#include "lockstep/datasets/json_field.h"

namespace lockstep {
namespace {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;
using Family = HuggingFaceFamily;

constexpr int64_t kMostListedLayers = 1 << 20;

/// transformers' names of the activations; the tanh form has two.
Activation gpt2_activation(const JsonKeys& keys) {
  const auto name = keys.get<std::string>("activation_function", "gelu_new");
  if (name == "gelu") return Activation::gelu;
  keys.check(name == "gelu_new" || name == "gelu_pytorch_tanh", "activation_function", name,
             "gelu, gelu_new, gelu_pytorch_tanh");
  return Activation::gelu_tanh;
}

TransformerConfig parse_gpt2(const JsonKeys& keys) {
  keys.allow("scale_attn_weights", true, true);
  keys.allow("scale_attn_by_inverse_layer_idx", false, false);
  keys.allow("add_cross_attention", false, false);
  TransformerConfig model;
  model.activation = gpt2_activation(keys);
  model.num_layers = keys.size("n_layer");
  model.hidden_size = keys.size("n_embd");
  model.num_attention_heads = keys.size("n_head");
  if (keys.has("n_inner")) model.ffn_hidden_size = keys.size("n_inner");
  model.seq_length = keys.size("n_positions");
  model.vocab_size = keys.size("vocab_size");
  model.layernorm_epsilon = keys.get<double>("layer_norm_epsilon", 1e-5);
  model.normalization = Normalization::LayerNorm;
  model.position_embedding_type = PositionEmbeddingType::learned_absolute;
  model.add_bias_linear = true;
  model.untie_embeddings_and_output_weights = !keys.get<bool>("tie_word_embeddings", true);
  return model;
}

/// Whether all layers of a Qwen model have the window; otherwise none may have it.
bool all_layers_slide(const JsonKeys& keys, int64_t num_layers) {
  const char* const allowed = "the same for all layers";
  if (keys.has("layer_types")) {
    const auto types = keys.get<std::vector<std::string>>("layer_types");
    const std::string first = types.empty() ? "" : types.front();
    const bool known = first == "full_attention" || first == "sliding_attention";
    keys.check(known && std::count(types.begin(), types.end(), first) ==
                            static_cast<int64_t>(types.size()),
               "layer_types", fmt::format("{}", fmt::join(types, ", ")),
               "full_attention in all layers, or sliding_attention in all");
    return first == "sliding_attention";
  }
  const auto full = keys.get<int64_t>("max_window_layers", 28);
  keys.check(full <= 0 || full >= num_layers, "max_window_layers", full,
             fmt::format("0, or at least the {} layers: {}", num_layers, allowed));
  return full <= 0;
}

void parse_window(const JsonKeys& keys, const HuggingFaceFamilyInfo& info,
                  TransformerConfig& model) {
  if (!info.window) return;
  const bool qwen = info.qkv_bias || info.qk_norm;
  if (qwen && !keys.get<bool>("use_sliding_window", false)) return;
  // The default of Mistral's and Qwen's configurations is 4,096.
  const bool by_default = !keys.mentions("sliding_window") && info.family != Family::mixtral;
  if (!keys.has("sliding_window") && !by_default) return;
  const int64_t window = keys.size("sliding_window", 4096);
  // transformers takes a Mistral with layer_types for a Ministral, whose layers choose their masks.
  const bool listed = info.family == Family::mistral && keys.has("layer_types");
  const bool chosen = (qwen && !info.experts) || listed;
  if (chosen && !all_layers_slide(keys, model.num_layers)) return;
  model.window_size = window;
}

/// Layers of Qwen3-MoE with experts: every decoder_sparse_step-th, except mlp_only_layers.
std::vector<int64_t> parse_layers_with_experts(const JsonKeys& keys, int64_t num_layers) {
  const int64_t step = keys.size("decoder_sparse_step", 1);
  const auto dense = keys.get<std::vector<int64_t>>("mlp_only_layers", std::vector<int64_t>());
  if (step == 1 && dense.empty()) return {1};
  keys.check(num_layers <= kMostListedLayers, "num_hidden_layers", num_layers,
             "<= 1048576 beside mlp_only_layers or decoder_sparse_step");
  std::vector<int64_t> list;
  for (int64_t layer = 0; layer < num_layers; ++layer)
    list.push_back((layer + 1) % step == 0 ? 1 : 0);
  for (const int64_t layer : dense)
    if (layer >= 0 && layer < num_layers) list[static_cast<size_t>(layer)] = 0;
  return list;
}

void parse_experts(const JsonKeys& keys, const HuggingFaceFamilyInfo& info,
                   TransformerConfig& model) {
  if (!info.experts) return;
  if (info.family == Family::deepseek_v3) {
    parse_deepseek_experts(keys, model);
    return;
  }
  if (info.family == Family::mixtral) {
    keys.allow("router_jitter_noise", 0.0, 0.0);
    model.num_experts = keys.size("num_local_experts", 8);
    model.moe_router_topk = keys.size("num_experts_per_tok", 2);
    keys.check(model.moe_router_topk > 1, "num_experts_per_tok", model.moe_router_topk,
               ">= 2, because the normalized weight of one expert is always 1");
    return;
  }
  const char* const count = keys.has("num_local_experts") ? "num_local_experts" : "num_experts";
  model.num_experts = keys.size(count, 128);
  model.moe_router_topk = keys.size("num_experts_per_tok", 8);
  model.moe_ffn_hidden_size = keys.size("moe_intermediate_size", 768);
  model.moe_router_pre_softmax = !keys.get<bool>("norm_topk_prob", false);
  keys.check(model.moe_router_topk > 1 || model.moe_router_pre_softmax, "norm_topk_prob", true,
             "false with num_experts_per_tok = 1, because the normalized weight of one expert is "
             "always 1");
  model.moe_layer_freq = parse_layers_with_experts(keys, model.num_layers);
}

/// Whether all linear layers have biases; otherwise none may have one.
bool parse_biases(const JsonKeys& keys, const HuggingFaceFamilyInfo& info) {
  if (info.family != Family::llama) {
    keys.allow("attention_bias", false, false);
    keys.allow("mlp_bias", false, false);
    return false;
  }
  const bool attention = keys.get<bool>("attention_bias", false);
  const bool mlp = keys.get<bool>("mlp_bias", false);
  keys.check(mlp == attention, "mlp_bias", mlp, fmt::format("{}, as attention_bias", attention));
  return attention;
}

int64_t parse_key_value_heads(const JsonKeys& keys, const HuggingFaceFamilyInfo& info,
                              int64_t heads) {
  const char* const key = "num_key_value_heads";
  const bool all_heads = info.key_value_heads == 0 || keys.mentions(key);
  const int64_t groups = keys.size(key, all_heads ? heads : info.key_value_heads);
  if (info.family == Family::deepseek_v3) return groups;  // see parse_latent_attention()
  keys.check(heads % groups == 0, key,
             fmt::format("{}{}", groups,
                         keys.has(key) ? "" : ", which a config.json without this key means"),
             fmt::format("a divisor of num_attention_heads ({})", heads));
  return groups;
}

TransformerConfig parse_rotary_family(const JsonKeys& keys, const HuggingFaceFamilyInfo& info) {
  const auto activation = keys.get<std::string>("hidden_act", "silu");
  keys.check(activation == "silu" || activation == "swish", "hidden_act", activation,
             "silu, swish");
  TransformerConfig model;
  model.num_layers = keys.size("num_hidden_layers");
  model.hidden_size = keys.size("hidden_size");
  model.num_attention_heads = keys.size("num_attention_heads");
  const bool latent = info.family == Family::deepseek_v3;
  model.num_query_groups = parse_key_value_heads(keys, info, model.num_attention_heads);
  const int64_t width = model.hidden_size / model.num_attention_heads;
  if (latent)
    parse_latent_attention(keys, model);
  else
    model.kv_channels = keys.size("head_dim", info.head_dim == 0 ? width : info.head_dim);
  model.ffn_hidden_size = keys.size("intermediate_size");
  model.seq_length = keys.size("max_position_embeddings");
  model.vocab_size = keys.size("vocab_size");
  model.layernorm_epsilon = keys.get<double>("rms_norm_eps", info.rms_norm_eps);
  parse_hugging_face_rope(keys, info, model);
  parse_window(keys, info, model);
  parse_experts(keys, info, model);
  model.normalization = Normalization::RMSNorm;
  model.position_embedding_type = PositionEmbeddingType::rope;
  model.activation = Activation::swiglu;
  model.add_bias_linear = parse_biases(keys, info);
  model.add_qkv_bias = info.qkv_bias;
  model.qk_layernorm = info.qk_norm || latent;
  model.untie_embeddings_and_output_weights = !keys.get<bool>("tie_word_embeddings", false);
  return model;
}

OrderedJson gpt2_json(const TransformerConfig& model) {
  return {{"activation_function", model.activation == Activation::gelu ? "gelu" : "gelu_new"},
          {"n_embd", model.hidden_size},
          {"n_head", model.num_attention_heads},
          {"n_inner", *model.ffn_hidden_size},
          {"n_layer", model.num_layers},
          {"n_positions", model.seq_length},
          {"layer_norm_epsilon", model.layernorm_epsilon},
          {"attn_pdrop", model.attention_dropout},
          {"embd_pdrop", model.hidden_dropout},
          {"resid_pdrop", model.hidden_dropout},
          {"tie_word_embeddings", !model.untie_embeddings_and_output_weights}};
}

void add_window(OrderedJson& json, const TransformerConfig& model,
                const HuggingFaceFamilyInfo& info) {
  if (!info.window) return;
  json["sliding_window"] = nullptr;
  if (model.window_size) json["sliding_window"] = *model.window_size;
  if (!info.qkv_bias && !info.qk_norm) return;
  json["use_sliding_window"] = model.window_size.has_value();
  json["max_window_layers"] = model.window_size ? 0 : model.num_layers;
}

void add_experts(OrderedJson& json, const TransformerConfig& model,
                 const HuggingFaceFamilyInfo& info) {
  if (!info.experts) return;
  json["num_experts_per_tok"] = model.moe_router_topk;
  json["router_aux_loss_coef"] = model.moe_aux_loss_coeff;
  if (info.family == Family::deepseek_v3) {
    add_deepseek_experts(json, model);
    return;
  }
  if (info.family == Family::mixtral) {
    json["intermediate_size"] = *model.moe_ffn_hidden_size;
    json["num_local_experts"] = *model.num_experts;
    return;
  }
  json["num_experts"] = *model.num_experts;
  json["moe_intermediate_size"] = *model.moe_ffn_hidden_size;
  json["norm_topk_prob"] = !model.moe_router_pre_softmax;
  json["decoder_sparse_step"] = 1;
  json["mlp_only_layers"] = OrderedJson::array();
  for (int64_t layer = 0; layer < model.num_layers; ++layer)
    if (!has_experts(model, layer)) json["mlp_only_layers"].push_back(layer);
}

OrderedJson rotary_family_json(const TransformerConfig& model, const HuggingFaceFamilyInfo& info) {
  OrderedJson json = {{"hidden_act", "silu"},
                      {"hidden_size", model.hidden_size},
                      {"intermediate_size", *model.ffn_hidden_size},
                      {"num_hidden_layers", model.num_layers},
                      {"num_attention_heads", model.num_attention_heads},
                      {"num_key_value_heads", *model.num_query_groups},
                      {"head_dim", *model.kv_channels},
                      {"max_position_embeddings", model.seq_length},
                      {"rms_norm_eps", model.layernorm_epsilon},
                      {"rope_theta", model.rotary_base},
                      {"rope_scaling", hugging_face_rope_scaling(model)},
                      {"attention_dropout", model.attention_dropout},
                      {"tie_word_embeddings", !model.untie_embeddings_and_output_weights}};
  if (!info.qkv_bias) json["attention_bias"] = model.add_bias_linear;
  if (info.family == Family::llama) json["mlp_bias"] = model.add_bias_linear;
  if (info.family == Family::deepseek_v3) add_latent_attention(json, model);
  add_window(json, model, info);
  add_experts(json, model, info);
  return json;
}

}  // namespace

std::string format_hugging_face_config(const TransformerConfig& model, const std::string& dtype) {
  const HuggingFaceFamilyInfo& info = family_info(hugging_face_family(model));
  OrderedJson json = {{"architectures", {info.architecture}}, {"model_type", info.model_type}};
  json.update(info.family == Family::gpt2 ? gpt2_json(model) : rotary_family_json(model, info));
  json["vocab_size"] = model.vocab_size;
  json["torch_dtype"] = dtype;
  json["bos_token_id"] = nullptr;
  json["eos_token_id"] = nullptr;
  return json.dump(2) + "\n";
}

TransformerConfig parse_hugging_face_config(std::string_view text, const std::string& path) {
  Json json;
  try {
    json = Json::parse(text);
  } catch (const Json::exception& error) {
    fail<FileError>("'{}' is not a JSON object: {}", path, problem_of(error));
  }
  require<FileError>(json.is_object(), "'{}' is not a JSON object", path);
  const JsonKeys keys(json, path);
  const auto type = keys.get<std::string>("model_type");
  const HuggingFaceFamilyInfo* const info = find_family(type);
  keys.check(info != nullptr, "model_type", type, hugging_face_model_types());
  keys.check(!keys.has("quantization_config"), "quantization_config", "quantized weights",
             "weights in floating point, without this key");
  keys.allow("is_causal", true, true);
  Config config;
  config.model = info->family == Family::gpt2 ? parse_gpt2(keys) : parse_rotary_family(keys, *info);
  try {
    config = resolve(config);
    validate(config);
  } catch (const ConfigError& error) {
    fail<FileError>("'{}': {}", path, error.what());
  }
  return config.model;
}

}  // namespace lockstep
