#include "lockstep/checkpoint/hugging_face_config.h"

#include <nlohmann/json.hpp>
#include <optional>

#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"

namespace lockstep {
namespace {

using Json = nlohmann::json;

template <class Value>
void expect(const char* field, const Value& found, const Value& allowed, const char* family) {
  require<ConfigError>(found == allowed, "model.{}: found {}, allowed in a {} model: {}", field,
                       found, family, allowed);
}

void check_gpt2(const TransformerConfig& model) {
  const char* const family = "GPT-2";
  expect<std::string>("normalization", to_string(model.normalization), "LayerNorm", family);
  require<ConfigError>(model.activation != Activation::swiglu,
                       "model.activation: found {}, allowed in a {} model: gelu, gelu_tanh",
                       to_string(model.activation), family);
  expect("add_bias_linear", model.add_bias_linear, true, family);
  expect("untie_embeddings_and_output_weights", model.untie_embeddings_and_output_weights, false,
         family);
  expect("num_query_groups", *model.num_query_groups, model.num_attention_heads, family);
  expect("kv_channels", *model.kv_channels, model.hidden_size / model.num_attention_heads, family);
}

void check_llama(const TransformerConfig& model) {
  const char* const family = "Llama";
  expect<std::string>("normalization", to_string(model.normalization), "RMSNorm", family);
  expect<std::string>("activation", to_string(model.activation), "swiglu", family);
  expect("add_bias_linear", model.add_bias_linear, false, family);
  expect("add_qkv_bias", model.add_qkv_bias, false, family);
  expect("rotary_percent", model.rotary_percent, 1.0, family);
}

/// Reads keys; `path` stands in every message.
class Keys {
 public:
  Keys(const Json& json, const std::string& path) : json_(json), path_(path) {}

  bool has(const char* key) const { return json_.contains(key) && !json_.at(key).is_null(); }

  template <class Value>
  Value get(const char* key, const std::optional<Value>& otherwise = {}) const {
    if (!has(key) && otherwise) return *otherwise;
    require<FileError>(has(key), "'{}': '{}' is missing", path_, key);
    try {
      return json_.at(key).template get<Value>();
    } catch (const Json::exception& error) {
      fail<FileError>("'{}': '{}': {}", path_, key, error.what());
    }
  }

  int64_t size(const char* key, std::optional<int64_t> otherwise = {}) const {
    const int64_t value = get<int64_t>(key, otherwise);
    check(!has(key) || json_.at(key).is_number_integer(), key, json_.value(key, Json()).dump(),
          "a whole number");
    require<FileError>(value >= 1, "'{}': '{}': found {}, allowed: >= 1", path_, key, value);
    return value;
  }

  template <class Value>
  void allow(const char* key, const Value& otherwise, const Value& allowed) const {
    const Value found = get<Value>(key, otherwise);
    check(found == allowed, key, found, allowed);
  }

  template <class Value, class Allowed>
  void check(bool good, const char* key, const Value& found, const Allowed& allowed) const {
    require<FileError>(good, "'{}': '{}': found {}, allowed: {}", path_, key, found, allowed);
  }

 private:
  const Json& json_;
  const std::string& path_;
};

/// transformers' names of the activations; those of tanh's form are two.
Activation gpt2_activation(const Keys& keys) {
  const auto name = keys.get<std::string>("activation_function", "gelu_new");
  if (name == "gelu") return Activation::gelu;
  keys.check(name == "gelu_new" || name == "gelu_pytorch_tanh", "activation_function", name,
             "gelu, gelu_new, gelu_pytorch_tanh");
  return Activation::gelu_tanh;
}

TransformerConfig parse_gpt2(const Keys& keys) {
  keys.allow("tie_word_embeddings", true, true);
  keys.allow("scale_attn_weights", true, true);
  keys.allow("scale_attn_by_inverse_layer_idx", false, false);
  keys.allow("add_cross_attention", false, false);
  TransformerConfig model;
  model.activation = gpt2_activation(keys);
  model.num_layers = keys.size("n_layer");
  model.hidden_size = keys.size("n_embd");
  model.num_attention_heads = keys.size("n_head");
  model.ffn_hidden_size = keys.size("n_inner", 4 * model.hidden_size);
  model.seq_length = keys.size("n_positions");
  model.vocab_size = keys.size("vocab_size");
  model.layernorm_epsilon = keys.get<double>("layer_norm_epsilon", 1e-5);
  model.normalization = Normalization::LayerNorm;
  model.position_embedding_type = PositionEmbeddingType::learned_absolute;
  model.add_bias_linear = true;
  model.untie_embeddings_and_output_weights = false;
  return model;
}

/// Of the two objects transformers takes rope_scaling where it is not empty.
double rope_base(const Json& json, const Keys& keys, const std::string& path) {
  const double base = keys.get<double>("rope_theta", 10000.0);
  for (const char* const name : {"rope_scaling", "rope_parameters"}) {
    if (!keys.has(name) || json.at(name).empty()) continue;
    keys.check(json.at(name).is_object(), name, json.at(name).dump(), "an object");
    const Keys inner(json.at(name), path);
    inner.allow<std::string>(inner.has("type") && !inner.has("rope_type") ? "type" : "rope_type",
                             "default", "default");
    return inner.get<double>("rope_theta", base);
  }
  return base;
}

TransformerConfig parse_llama(const Json& json, const Keys& keys, const std::string& path) {
  keys.allow<std::string>("hidden_act", "silu", "silu");
  keys.allow("attention_bias", false, false);
  keys.allow("mlp_bias", false, false);
  TransformerConfig model;
  model.num_layers = keys.size("num_hidden_layers");
  model.hidden_size = keys.size("hidden_size");
  model.num_attention_heads = keys.size("num_attention_heads");
  model.num_query_groups = keys.size("num_key_value_heads", model.num_attention_heads);
  model.kv_channels = keys.size("head_dim", model.hidden_size / model.num_attention_heads);
  model.ffn_hidden_size = keys.size("intermediate_size");
  model.seq_length = keys.size("max_position_embeddings");
  model.vocab_size = keys.size("vocab_size");
  model.layernorm_epsilon = keys.get<double>("rms_norm_eps", 1e-6);
  model.rotary_base = rope_base(json, keys, path);
  model.normalization = Normalization::RMSNorm;
  model.position_embedding_type = PositionEmbeddingType::rope;
  model.activation = Activation::swiglu;
  model.add_bias_linear = false;
  model.untie_embeddings_and_output_weights = !keys.get<bool>("tie_word_embeddings", false);
  return model;
}

}  // namespace

HuggingFaceFamily hugging_face_family(const TransformerConfig& model) {
  require<ConfigError>(!model.num_experts,
                       "model.num_experts: found {}, allowed in a GPT-2 or "
                       "Llama model: unset",
                       model.num_experts.value_or(0));
  switch (model.position_embedding_type) {
    case PositionEmbeddingType::learned_absolute:
      check_gpt2(model);
      return HuggingFaceFamily::gpt2;
    case PositionEmbeddingType::rope:
      check_llama(model);
      return HuggingFaceFamily::llama;
    case PositionEmbeddingType::none:
      break;
  }
  fail<ConfigError>(
      "model.position_embedding_type: found {}, allowed: learned_absolute (GPT-2), "
      "rope (Llama)",
      to_string(model.position_embedding_type));
}

std::string format_hugging_face_config(const TransformerConfig& model, const std::string& dtype) {
  nlohmann::ordered_json json;
  if (hugging_face_family(model) == HuggingFaceFamily::gpt2)
    json = {{"architectures", {"GPT2LMHeadModel"}},
            {"model_type", "gpt2"},
            {"activation_function", model.activation == Activation::gelu ? "gelu" : "gelu_new"},
            {"n_embd", model.hidden_size},
            {"n_head", model.num_attention_heads},
            {"n_inner", *model.ffn_hidden_size},
            {"n_layer", model.num_layers},
            {"n_positions", model.seq_length},
            {"layer_norm_epsilon", model.layernorm_epsilon},
            {"attn_pdrop", model.attention_dropout},
            {"embd_pdrop", model.hidden_dropout},
            {"resid_pdrop", model.hidden_dropout},
            {"tie_word_embeddings", true}};
  else
    json = {{"architectures", {"LlamaForCausalLM"}},
            {"model_type", "llama"},
            {"hidden_act", "silu"},
            {"hidden_size", model.hidden_size},
            {"intermediate_size", *model.ffn_hidden_size},
            {"num_hidden_layers", model.num_layers},
            {"num_attention_heads", model.num_attention_heads},
            {"num_key_value_heads", *model.num_query_groups},
            {"head_dim", *model.kv_channels},
            {"max_position_embeddings", model.seq_length},
            {"rms_norm_eps", model.layernorm_epsilon},
            {"rope_theta", model.rotary_base},
            {"attention_bias", false},
            {"attention_dropout", model.attention_dropout},
            {"mlp_bias", false},
            {"tie_word_embeddings", !model.untie_embeddings_and_output_weights}};
  json["vocab_size"] = model.vocab_size;
  json["torch_dtype"] = dtype;
  json["bos_token_id"] = nullptr;
  json["eos_token_id"] = nullptr;
  return json.dump(2) + "\n";
}

TransformerConfig parse_hugging_face_config(std::string_view text, const std::string& path) {
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  require<FileError>(json.is_object(), "'{}' is no JSON object", path);
  const Keys keys(json, path);
  const auto type = keys.get<std::string>("model_type");
  require<FileError>(type == "gpt2" || type == "llama",
                     "'{}': 'model_type': found {}, allowed: gpt2, llama", path, type);
  Config config;
  config.model = type == "gpt2" ? parse_gpt2(keys) : parse_llama(json, keys, path);
  try {
    config = resolve(config);
    validate(config);
  } catch (const ConfigError& error) {
    fail<FileError>("'{}': {}", path, error.what());
  }
  return config.model;
}

}  // namespace lockstep
