#pragma once

#include "lockstep/core/config.h"

/// The families of Hugging Face's transformers that GPTModel can represent, as data. Needs no
/// libtorch.
namespace lockstep {

/// gpt2: learned positions, LayerNorm, gelu in either form, biases. The others have rotary
/// positions, RMSNorm, SwiGLU, grouped queries and no biases (llama may have them in all linear
/// layers), and differ in options of their layers: see HuggingFaceFamilyInfo. Without a window
/// mistral computes what llama does, also where the number of heads does not divide the hidden
/// size, which transformers refuses for llama. deepseek_v3 has latent attention.
enum class HuggingFaceFamily {
  gpt2,
  llama,
  mistral,
  qwen2,
  qwen3,
  mixtral,
  qwen3_moe,
  deepseek_v3
};

struct HuggingFaceFamilyInfo {
  HuggingFaceFamily family;
  const char* model_type;    ///< in config.json
  const char* architecture;  ///< transformers' class
  const char* name;          ///< in messages
  bool qkv_bias = false;     ///< add_qkv_bias
  bool qk_norm = false;      ///< qk_layernorm
  bool window = false;       ///< window_size may be set
  bool experts = false;      ///< num_experts
  /// What transformers assumes if config.json has no such key.
  int64_t key_value_heads = 0;  ///< 0: num_attention_heads
  int64_t head_dim = 0;         ///< 0: hidden_size / num_attention_heads
  double rope_theta = 10000;
  double rms_norm_eps = 1e-6;
};

/// The row of a family.
const HuggingFaceFamilyInfo& family_info(HuggingFaceFamily family);

/// The row of config.json's model_type; null if there is none.
const HuggingFaceFamilyInfo* find_family(const std::string& model_type);

/// "gpt2, llama, ...": all model_types.
std::string hugging_face_model_types();

/// The family of a resolved model. ConfigError names the field that the family does not have, with
/// what was found and what is allowed.
HuggingFaceFamily hugging_face_family(const TransformerConfig& model);

}  // namespace lockstep
