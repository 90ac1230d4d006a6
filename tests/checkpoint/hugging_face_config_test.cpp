// config.json of Hugging Face's families: import, export, and what is refused.

#include "lockstep/checkpoint/hugging_face_config.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <set>

#include "lockstep/checkpoint/companion_files.h"
#include "lockstep/checkpoint/moved_tokenizer.h"
#include "lockstep/core/config_io.h"
#include "lockstep/core/error.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::throws_with;

constexpr const char* kDeepSeekFields =
    "num_layers: 3 multi_latent_attention: true qk_layernorm: true layernorm_epsilon: 1e-6 "
    "q_lora_rank: 24 kv_lora_rank: 20 qk_head_dim: 12 qk_pos_emb_head_dim: 6 v_head_dim: 10 "
    "untie_embeddings_and_output_weights: true num_experts: 8 moe_ffn_hidden_size: 16 "
    "moe_shared_expert_intermediate_size: 32 moe_router_score_function: \"sigmoid\" "
    "moe_router_enable_expert_bias: true moe_router_topk: 4 moe_router_num_groups: 4 "
    "moe_router_group_topk: 2 moe_router_topk_scaling_factor: 2.5 moe_layer_freq: [0, 0, 1] "
    "rope_scaling_type: \"yarn\" rope_scaling_factor: 40 rope_mscale_all_dim: 1";
constexpr const char* kPlainDeepSeekFields =
    "multi_latent_attention: true qk_layernorm: true layernorm_epsilon: 1e-6 num_experts: 4 "
    "moe_router_topk: 1 moe_shared_expert_intermediate_size: 512 "
    "moe_router_score_function: \"sigmoid\" moe_router_enable_expert_bias: true";

TEST(HuggingFaceConfig, TellsWhichFieldFitsNoFamily) {
  const auto model = [](const std::string& text) {
    return parse_config("model { " + text + " }", "test").model;
  };
  const auto refuses = [&](const std::string& text, const std::string& part) {
    return throws_with<ConfigError>([&] { hugging_face_family(model(text)); }, part);
  };
  EXPECT_EQ(hugging_face_family(model("")), HuggingFaceFamily::llama);
  EXPECT_EQ(hugging_face_family(model("add_qkv_bias: true")), HuggingFaceFamily::qwen2);
  EXPECT_EQ(hugging_face_family(model("window_size: 4")), HuggingFaceFamily::mistral);
  EXPECT_EQ(hugging_face_family(model("qk_layernorm: true window_size: 4")),
            HuggingFaceFamily::qwen3);
  EXPECT_EQ(hugging_face_family(model("num_experts: 4")), HuggingFaceFamily::mixtral);
  EXPECT_EQ(hugging_face_family(model("num_experts: 4 qk_layernorm: true")),
            HuggingFaceFamily::qwen3_moe);
  EXPECT_TRUE(refuses("add_qkv_bias: true qk_layernorm: true",
                      "model.add_qkv_bias: found true, allowed in a Qwen3 model: false"));
  EXPECT_TRUE(
      refuses("num_experts: 4 moe_layer_freq: 2", "model.moe_layer_freq: layer 1 is dense"));
  EXPECT_TRUE(refuses("num_experts: 4 moe_router_pre_softmax: true",
                      "found true, allowed in a Mixtral model: false"));
  EXPECT_TRUE(refuses("num_experts: 4 moe_router_score_function: \"sigmoid\"",
                      "found sigmoid, allowed in a Mixtral model: softmax"));
  EXPECT_TRUE(refuses("num_experts: 4 moe_shared_expert_intermediate_size: 8",
                      "found 8, allowed in a Mixtral model: unset"));
  EXPECT_TRUE(refuses("rope_scaling_type: \"yarn\" rope_mscale_all_dim: 1",
                      "model.rope_mscale_all_dim: found 1, allowed in a Llama model: 0"));
  const std::string latent = kDeepSeekFields;
  EXPECT_EQ(hugging_face_family(model(latent)), HuggingFaceFamily::deepseek_v3);
  const auto refuses_latent = [&](const std::string& field, const std::string& part) {
    const Config config = parse_config("model { " + latent + " }", "test", {"model." + field});
    return throws_with<ConfigError>([&] { hugging_face_family(config.model); }, part);
  };
  EXPECT_TRUE(refuses_latent("layernorm_epsilon=1e-5",
                             "found 1e-05, allowed in a DeepSeek-V3 model: 1e-06"));
  EXPECT_TRUE(refuses_latent("qk_layernorm=false", "model.qk_layernorm: found false"));
  EXPECT_TRUE(refuses_latent("window_size=8", "model.window_size: found 8"));
  EXPECT_TRUE(refuses_latent("moe_router_enable_expert_bias=false",
                             "model.moe_router_enable_expert_bias: found false"));
  EXPECT_TRUE(refuses_latent("moe_router_topk=2",
                             "model.moe_router_topk: found 2, allowed in a DeepSeek-V3 model: 4"));
  EXPECT_TRUE(refuses_latent("moe_shared_expert_intermediate_size=33",
                             "found 33, allowed in a DeepSeek-V3 model: a multiple of "
                             "model.moe_ffn_hidden_size (16)"));
  EXPECT_TRUE(refuses("multi_latent_attention: true qk_layernorm: true layernorm_epsilon: 1e-6",
                      "model.num_experts: is not set"));
  EXPECT_TRUE(refuses_latent("moe_layer_freq=2", "layer 1 is dense behind one with experts"));
  EXPECT_EQ(hugging_face_family(model("add_bias_linear: true")), HuggingFaceFamily::llama);
  for (const std::string other : {"window_size: 4", "qk_layernorm: true", "num_experts: 4"})
    EXPECT_TRUE(refuses("add_bias_linear: true " + other, "model.add_bias_linear: found true"));
  EXPECT_TRUE(refuses("activation: \"gelu\"", "model.activation: found gelu"));
  EXPECT_TRUE(refuses("position_embedding_type: \"none\"", "allowed: learned_absolute"));
  EXPECT_TRUE(refuses("position_embedding_type: \"learned_absolute\"", "found RMSNorm"));
}

TEST(HuggingFaceConfig, ComesBack) {
  for (const char* const text :
       {"num_query_groups: 2 rotary_base: 5000 untie_embeddings_and_output_weights: true",
        "kv_channels: 16 layernorm_epsilon: 1e-6",
        "rope_scaling_type: \"linear\" rope_scaling_factor: 2.5",
        "rope_scaling_type: \"llama3\" rope_scaling_factor: 32 rope_low_freq_factor: 1.5 "
        "rope_high_freq_factor: 5 rope_original_max_position_embeddings: 64",
        "window_size: 8 num_query_groups: 2",
        "add_qkv_bias: true",
        "add_bias_linear: true",
        "add_qkv_bias: true window_size: 8",
        "qk_layernorm: true kv_channels: 16",
        "qk_layernorm: true window_size: 8",
        "num_experts: 4 moe_router_topk: 3 window_size: 5",
        "num_experts: 4 qk_layernorm: true moe_ffn_hidden_size: 24 window_size: 5",
        "num_experts: 4 qk_layernorm: true moe_router_pre_softmax: true num_layers: 3 "
        "moe_layer_freq: [0, 1, 1]",
        "rope_scaling_type: \"yarn\" rope_scaling_factor: 4 rope_beta_fast: 8 rope_beta_slow: 2 "
        "rope_original_max_position_embeddings: 64 qk_layernorm: true kv_channels: 16",
        "rope_scaling_type: \"yarn\" rope_mscale: 0 window_size: 8",
        kDeepSeekFields,
        kPlainDeepSeekFields,
        "position_embedding_type: \"learned_absolute\" normalization: \"LayerNorm\" "
        "activation: \"gelu\" add_bias_linear: true ffn_hidden_size: 96",
        "position_embedding_type: \"learned_absolute\" normalization: \"LayerNorm\" "
        "activation: \"gelu_tanh\" add_bias_linear: true",
        "position_embedding_type: \"learned_absolute\" normalization: \"LayerNorm\" "
        "activation: \"gelu\" add_bias_linear: true untie_embeddings_and_output_weights: true"}) {
    const Config config = parse_config("model { " + std::string(text) + " }", "test");
    const std::string json = format_hugging_face_config(config.model);
    Config found = config;
    found.model = parse_hugging_face_config(json, "config.json");
    EXPECT_EQ(print_config(found), print_config(config)) << json;
  }
}

TEST(EndsOfText, AreThatOfTheTokenizerAndThoseOfTheGenerationConfig) {
  const testing::TemporaryFolder folder;
  ByteTokenizer tokenizer;
  Config config;
  using Ids = std::set<int64_t>;
  EXPECT_EQ(ends_of_text(config, tokenizer), Ids{256});
  config.data.tokenizer = "hf:" + folder.path().string() + "/tokenizer.json";
  EXPECT_EQ(ends_of_text(config, tokenizer), Ids{256});
  for (const auto& [text, ids] :
       {std::pair("{}", Ids{256}), std::pair(R"({"eos_token_id": null})", Ids{256}),
        std::pair(R"({"eos_token_id": 7})", Ids{7, 256}),
        std::pair(R"({"eos_token_id": [9, 7]})", Ids{7, 9, 256})}) {
    folder.write("generation_config.json", text);
    EXPECT_EQ(ends_of_text(config, tokenizer), ids) << text;
  }
  for (const auto& [text, part] :
       {std::pair("{\n", "generation_config.json' is damaged: parse error at line 2"),
        std::pair("[]", "generation_config.json': found [], allowed: "),
        std::pair(R"({"eos_token_id": [-1]})", "eos_token_id[0]: found -1, allowed: ")}) {
    folder.write("generation_config.json", text);
    EXPECT_TRUE(throws_with<FileError>([&] { ends_of_text(config, tokenizer); }, part)) << text;
  }
}

TEST(HuggingFaceConfig, DamageIsNamed) {
  const auto refuses = [](const std::string& json, const std::string& part) {
    return throws_with<FileError>([&] { parse_hugging_face_config(json, "config.json"); }, part);
  };
  EXPECT_TRUE(refuses("{", "'config.json' is not a JSON object: parse error at line 1, column 2"));
  EXPECT_TRUE(refuses("[]", "'config.json' is not a JSON object"));
  EXPECT_TRUE(refuses("{}", "'model_type' is missing"));
  EXPECT_TRUE(refuses(R"({"model_type":"bert"})", "found bert, allowed: gpt2, llama"));
  for (const std::string name : {"relu", "gelu_fast", "quick_gelu", "swiglu"})
    EXPECT_TRUE(refuses(
        R"({"model_type":"gpt2","activation_function":")" + name + "\"}",
        "'activation_function': found " + name + ", allowed: gelu, gelu_new, gelu_pytorch_tanh"));
  EXPECT_TRUE(refuses(R"({"model_type":"llama","hidden_size":"x"})", "'num_hidden_layers'"));
  EXPECT_TRUE(refuses(R"({"model_type":"llama","num_hidden_layers":"2"})",
                      "'num_hidden_layers': found \"2\", allowed: a whole number"));
  EXPECT_TRUE(refuses(R"({"model_type":"llama","num_hidden_layers":0})", "found 0, allowed: >= 1"));
  EXPECT_TRUE(refuses(R"({"model_type":"llama","num_hidden_layers":1.5})",
                      "'num_hidden_layers': found 1.5, allowed: a whole number"));
  const std::string qwen =
      R"({"model_type":"qwen2","hidden_size":64,"intermediate_size":64,"num_hidden_layers":2,)"
      R"("num_attention_heads":4,"num_key_value_heads":4,"vocab_size":256,)"
      R"("max_position_embeddings":64,"use_sliding_window":true,"max_window_layers":)";
  for (const std::string number : {"1.5e+103", "-1e+30", "28.5", "9223372036854775808", "true"})
    EXPECT_TRUE(refuses(qwen + number + "}",
                        "'max_window_layers': found " + number + ", allowed: a whole number"));
  EXPECT_TRUE(refuses(R"({"model_type":"qwen3_moe","num_hidden_layers":2,"hidden_size":64,)"
                      R"("intermediate_size":64,"num_attention_heads":4,"vocab_size":256,)"
                      R"("num_key_value_heads":4,"max_position_embeddings":64,)"
                      R"("moe_intermediate_size":64,"num_experts":4,"num_experts_per_tok":2,)"
                      R"("mlp_only_layers":[0,1e300]})",
                      "'mlp_only_layers': found [0,1e+300], allowed: a list of whole numbers"));
}

// transformers uses rope_scaling if it is not empty, and then ignores rope_parameters.
TEST(HuggingFaceConfig, RotaryAnglesAreThoseOfTransformers) {
  const auto parse = [](const std::string& rope) {
    return parse_hugging_face_config(
        R"({"model_type":"llama","num_hidden_layers":1,"hidden_size":32,"num_attention_heads":4,)"
        R"("intermediate_size":48,"max_position_embeddings":16,"vocab_size":64)" +
            rope + "}",
        "config.json");
  };
  const std::string theirs = R"(,"rope_parameters":{"rope_type":"default","rope_theta":5e5})";
  EXPECT_EQ(parse("").rotary_base, 1e4);
  EXPECT_EQ(parse(theirs).rotary_base, 5e5);
  EXPECT_EQ(parse(theirs + R"(,"rope_scaling":null,"rope_theta":7)").rotary_base, 5e5);
  EXPECT_EQ(parse(theirs + R"(,"rope_scaling":{},"rope_theta":7)").rotary_base, 5e5);
  EXPECT_EQ(parse(theirs + R"(,"rope_scaling":{"type":"default"},"rope_theta":7)").rotary_base, 7);
  EXPECT_TRUE(throws_with<FileError>(
      [&] { parse(R"(,"rope_parameters":{"rope_type":"linear","factor":"x"})"); },
      "'config.json': 'rope_parameters.factor': "));
  for (const std::string both : {"", theirs.c_str()}) {
    EXPECT_TRUE(throws_with<FileError>(
        [&] { parse(both + R"(,"rope_scaling":{"rope_type":"llama3","factor":8})"); },
        "'rope_scaling.low_freq_factor' is missing"));
    EXPECT_TRUE(throws_with<FileError>(
        [&] { parse(both + R"(,"rope_scaling":{"rope_type":"longrope","factor":8})"); },
        "'rope_scaling.rope_type': found longrope, allowed: default, linear, llama3, yarn"));
    EXPECT_TRUE(throws_with<FileError>(
        [&] { parse(both + R"(,"rope_scaling":{"type":"dynamic","factor":8})"); },
        "'rope_scaling.type': found dynamic, allowed: "));
    EXPECT_EQ(parse(both + R"(,"rope_scaling":{"type":"linear","factor":4})").rope_scaling_factor,
              4);
    EXPECT_TRUE(throws_with<FileError>([&] { parse(both + R"(,"rope_scaling":8)"); },
                                       "'rope_scaling': found 8, allowed: an object"));
  }
}

/// Parses a config.json of `type` with `keys` in addition to those that all families have.
TransformerConfig parse_family(const std::string& type, const std::string& keys) {
  return parse_hugging_face_config(
      R"({"num_hidden_layers":4,"hidden_size":32,"num_attention_heads":32,"intermediate_size":48,)"
      R"("max_position_embeddings":16,"vocab_size":64,"head_dim":4,"model_type":")" +
          type + "\"" + keys + "}",
      "config.json");
}

// As in the classes of transformers 5.23.
TEST(HuggingFaceConfig, WhatAMissingKeyMeansDiffersByFamily) {
  EXPECT_EQ(parse_family("llama", "").num_query_groups, 32);
  EXPECT_EQ(parse_family("mistral", "").num_query_groups, 8);
  EXPECT_EQ(parse_family("mistral", R"(,"num_key_value_heads":null)").num_query_groups, 32);
  EXPECT_EQ(parse_family("mistral", "").window_size, 4096);
  EXPECT_EQ(parse_family("mistral", R"(,"sliding_window":null)").window_size, std::nullopt);
  EXPECT_EQ(parse_family("mistral", R"(,"sliding_window":7)").window_size, 7);
  EXPECT_EQ(parse_family("qwen2", "").window_size, std::nullopt);
  EXPECT_EQ(parse_family("qwen3_moe", "").num_query_groups, 4);
  EXPECT_TRUE(parse_family("qwen3_moe", "").moe_router_pre_softmax);
  const TransformerConfig mixtral = parse_family("mixtral", "");
  EXPECT_EQ(mixtral.rotary_base, 1e6);
  EXPECT_EQ(mixtral.layernorm_epsilon, 1e-5);
  EXPECT_EQ(mixtral.num_experts, 8);
  EXPECT_EQ(mixtral.window_size, std::nullopt);
}

TEST(HuggingFaceConfig, Biases) {
  EXPECT_TRUE(parse_family("llama", R"(,"attention_bias":true,"mlp_bias":true)").add_bias_linear);
  EXPECT_FALSE(parse_family("llama", R"(,"attention_bias":false)").add_bias_linear);
  const auto refuses = [](const std::string& type, const std::string& keys,
                          const std::string& part) {
    return throws_with<FileError>([&] { parse_family(type, keys); }, part);
  };
  EXPECT_TRUE(refuses("llama", R"(,"attention_bias":true)",
                      "'mlp_bias': found false, allowed: true, as attention_bias"));
  EXPECT_TRUE(refuses("llama", R"(,"mlp_bias":true)",
                      "'mlp_bias': found true, allowed: false, as attention_bias"));
  for (const std::string type : {"mistral", "qwen3", "qwen3_moe"})
    EXPECT_TRUE(
        refuses(type, R"(,"attention_bias":true)", "'attention_bias': found true, allowed: false"));
}

TEST(HuggingFaceConfig, WhatRotaryFamiliesCannotBeIsNamed) {
  const auto refuses = [](const std::string& type, const std::string& keys,
                          const std::string& part) {
    return throws_with<FileError>([&] { parse_family(type, keys); }, part);
  };
  EXPECT_EQ(parse_family("llama", R"(,"hidden_act":"swish")").activation, Activation::swiglu);
  EXPECT_TRUE(refuses("llama", R"(,"hidden_act":"relu")",
                      "'hidden_act': found relu, allowed: silu, swish"));
  EXPECT_TRUE(refuses("mistral", R"(,"num_attention_heads":6)",
                      "'num_key_value_heads': found 8, which a config.json without this key "
                      "means, allowed: a divisor of num_attention_heads (6)"));
  EXPECT_TRUE(refuses("llama", R"(,"num_key_value_heads":5)",
                      "'num_key_value_heads': found 5, allowed: a divisor of num_attention_heads "
                      "(32)"));
  EXPECT_TRUE(refuses("mixtral", R"(,"router_jitter_noise":0.1)",
                      "'router_jitter_noise': found 0.1, allowed: 0"));
  EXPECT_EQ(parse_family("mixtral", R"(,"router_jitter_noise":0.0)").num_experts, 8);
  EXPECT_TRUE(refuses("mixtral", R"(,"num_experts_per_tok":1)",
                      "'num_experts_per_tok': found 1, allowed: >= 2, because the normalized "
                      "weight of one expert is always 1"));
  EXPECT_TRUE(refuses("qwen3_moe", R"(,"num_experts_per_tok":1,"norm_topk_prob":true)",
                      "'norm_topk_prob': found true, allowed: false with num_experts_per_tok = 1"));
  EXPECT_EQ(parse_family("qwen3_moe", R"(,"num_experts_per_tok":1)").moe_router_topk, 1);
}

TEST(HuggingFaceConfig, AWindowHoldsInAllLayersOrInNone) {
  const std::string on = R"(,"use_sliding_window":true,"sliding_window":6,"max_window_layers":)";
  for (const std::string type : {"qwen2", "qwen3"}) {
    EXPECT_EQ(parse_family(type, on + "0").window_size, 6);
    EXPECT_EQ(parse_family(type, on + "4").window_size, std::nullopt);
    EXPECT_TRUE(throws_with<FileError>([&] { parse_family(type, on + "2"); },
                                       "'max_window_layers': found 2, allowed: 0, or at least"));
    const auto listed = [&](const std::string& last) {
      return parse_family(type, on +
                                    R"(2,"layer_types":["sliding_attention","sliding_attention",)" +
                                    R"("sliding_attention",")" + last + "\"]")
          .window_size;
    };
    EXPECT_EQ(listed("sliding_attention"), 6);
    EXPECT_TRUE(throws_with<FileError>([&] { listed("full_attention"); },
                                       "sliding_attention, full_attention, allowed: full_attention "
                                       "in all layers, or sliding_attention in all"));
  }
  EXPECT_EQ(parse_family("qwen3_moe", on + "2").window_size, 6);  // does not read max_window_layers
}

// The values that transformers 5.23 uses for missing keys, and its factor on cosines and sines.
TEST(HuggingFaceConfig, Yarn) {
  const auto parse = [](const std::string& type, const std::string& keys) {
    return parse_family(type, R"(,"num_key_value_heads":32,"rope_scaling":{"rope_type":"yarn",)"
                              R"("factor":4.0)" +
                                  keys + "}");
  };
  const TransformerConfig plain = parse("qwen3", "");
  EXPECT_EQ(plain.rope_original_max_position_embeddings, 16);
  EXPECT_EQ(plain.rope_beta_fast, 32);
  EXPECT_EQ(plain.rope_mscale, 1);
  const double one = 0.1 * std::log(4.0);
  EXPECT_NEAR(parse("qwen3", R"(,"attention_factor":1.2)").rope_mscale, 0.2 / one, 1e-14);
  EXPECT_EQ(parse("qwen3", R"(,"attention_factor":1.0)").rope_mscale, 0);
  EXPECT_EQ(parse("qwen3", R"(,"mscale":2.0)").rope_mscale, 1);
  const TransformerConfig ratio = parse("qwen3", R"(,"mscale":2.0,"mscale_all_dim":1.0)");
  EXPECT_NEAR(ratio.rope_mscale, ((2 * one + 1) / (one + 1) - 1) / one, 1e-14);
  EXPECT_EQ(ratio.rope_mscale_all_dim, 0);
  const TransformerConfig latent = parse("deepseek_v3", R"(,"mscale":2.0,"mscale_all_dim":1.0)");
  EXPECT_EQ(latent.rope_mscale, 2);
  EXPECT_EQ(latent.rope_mscale_all_dim, 1);
  const TransformerConfig half = parse("deepseek_v3", R"(,"mscale_all_dim":1.0)");
  EXPECT_NEAR(half.rope_mscale, ((one + 1) * (one + 1) - 1) / one, 1e-14);
  EXPECT_TRUE(
      throws_with<FileError>([&] { parse("qwen3", R"(,"attention_factor":0.9)"); },
                             "'rope_scaling.attention_factor': found 0.9, allowed: 1 or more"));
  EXPECT_TRUE(throws_with<FileError>([&] { parse("qwen3", R"(,"truncate":false)"); },
                                     "'rope_scaling.truncate': found false, allowed: true"));
}

TEST(HuggingFaceConfig, DeepSeek) {
  const TransformerConfig plain = parse_family("deepseek_v3", R"(,"num_key_value_heads":32)");
  EXPECT_EQ(plain.q_lora_rank, 1536);
  EXPECT_EQ(plain.kv_channels, 192);
  EXPECT_EQ(plain.moe_router_num_groups, 8);
  EXPECT_EQ(plain.moe_shared_expert_intermediate_size, 2048);
  EXPECT_EQ(plain.moe_layer_freq, (std::vector<int64_t>{0, 0, 0, 1}));
  EXPECT_TRUE(plain.untie_embeddings_and_output_weights);
  const auto refuses = [](const std::string& keys, const std::string& part) {
    return throws_with<FileError>(
        [&] { parse_family("deepseek_v3", R"(,"num_key_value_heads":32,)" + keys); }, part);
  };
  EXPECT_TRUE(refuses(R"("topk_group":2)", "'num_experts_per_tok': found 8, allowed: twice"));
  EXPECT_TRUE(refuses(R"("norm_topk_prob":false)", "'norm_topk_prob': found false"));
  EXPECT_TRUE(refuses(R"("rope_interleave":false)", "'rope_interleave': found false"));
  EXPECT_TRUE(refuses(R"("rms_norm_eps":1e-5)", "'rms_norm_eps': found 1e-05"));
  EXPECT_TRUE(refuses(R"("scoring_func":"softmax")", "'scoring_func': found softmax"));
  EXPECT_TRUE(refuses(R"("n_shared_experts":0)", "'n_shared_experts': found 0, allowed: >= 1"));
  EXPECT_TRUE(refuses(R"("quantization_config":{"quant_method":"fp8"})",
                      "'quantization_config': found quantized weights"));
  EXPECT_TRUE(throws_with<FileError>([] { parse_family("deepseek_v3", ""); },
                                     "'num_key_value_heads': found 128, allowed: 32"));
}

TEST(HuggingFaceConfig, LayersWithExperts) {
  using Layers = std::vector<int64_t>;
  EXPECT_EQ(parse_family("qwen3_moe", "").moe_layer_freq, Layers{1});
  EXPECT_EQ(parse_family("qwen3_moe", R"(,"mlp_only_layers":[1, 7])").moe_layer_freq,
            (Layers{1, 0, 1, 1}));
  EXPECT_EQ(parse_family("qwen3_moe", R"(,"decoder_sparse_step":2)").moe_layer_freq,
            (Layers{0, 1, 0, 1}));
  EXPECT_TRUE(throws_with<FileError>(
      [] { parse_family("qwen3_moe", R"(,"num_hidden_layers":100000000,"mlp_only_layers":[1])"); },
      "'num_hidden_layers': found 100000000"));
}

TEST(MovedTokenizer, IsFoundBesideTheCheckpointOfItsImport) {
  const testing::TemporaryFolder folder;
  const std::string root = folder.path(), kept = root + "/moved/hugging_face";
  std::filesystem::create_directories(kept);
  for (const char* const name : {"/tokenizer.json", "/vocab.json", "/merges.txt"})
    std::ofstream(kept + name) << "{}";
  const std::string checkpoint = root + "/moved/step_0", gone = root + "/before";
  const std::string later = root + "/later/hugging_face";  // of an import to the old path
  std::filesystem::create_directories(later + "/tokenizer.json");
  for (const std::string& from : {checkpoint, checkpoint + "/../step_0"}) {
    for (const std::string& old : {later, gone + "/hugging_face"})
      EXPECT_EQ(find_moved_tokenizer("hf:" + old + "/tokenizer.json", from),
                "hf:" + kept + "/tokenizer.json");
    EXPECT_EQ(find_moved_tokenizer("gpt2:" + gone + "/hugging_face", from), "gpt2:" + kept);
  }
  for (const std::string& same :
       {std::string("byte"), "hf:" + gone + "/tokenizer.json", "gpt2:" + gone,
        "sentencepiece:" + gone + "/hugging_face/tokenizer.model", "hf:" + kept + "/tokenizer.json",
        "gpt2:" + kept})
    EXPECT_EQ(find_moved_tokenizer(same, checkpoint), same);
  const std::string lost = "gpt2:" + gone + "/hugging_face";
  EXPECT_EQ(find_moved_tokenizer(lost, root + "/step_0"), lost);
}

}  // namespace
}  // namespace lockstep
