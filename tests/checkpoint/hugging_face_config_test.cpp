// config.json of Hugging Face's families: there, back, and what is refused.

#include "lockstep/checkpoint/hugging_face_config.h"

#include <gtest/gtest.h>

#include "lockstep/core/config_io.h"
#include "lockstep/core/error.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::throws_with;

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
  EXPECT_TRUE(refuses("add_bias_linear: true", "model.add_bias_linear: found true"));
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
        "window_size: 8 num_query_groups: 2", "add_qkv_bias: true",
        "add_qkv_bias: true window_size: 8", "qk_layernorm: true kv_channels: 16",
        "qk_layernorm: true window_size: 8", "num_experts: 4 moe_router_topk: 3 window_size: 5",
        "num_experts: 4 qk_layernorm: true moe_ffn_hidden_size: 24 window_size: 5",
        "num_experts: 4 qk_layernorm: true moe_router_pre_softmax: true num_layers: 3 "
        "moe_layer_freq: [0, 1, 1]",
        "position_embedding_type: \"learned_absolute\" normalization: \"LayerNorm\" "
        "activation: \"gelu\" add_bias_linear: true ffn_hidden_size: 96",
        "position_embedding_type: \"learned_absolute\" normalization: \"LayerNorm\" "
        "activation: \"gelu_tanh\" add_bias_linear: true"}) {
    const Config config = parse_config("model { " + std::string(text) + " }", "test");
    const std::string json = format_hugging_face_config(config.model);
    Config found = config;
    found.model = parse_hugging_face_config(json, "config.json");
    EXPECT_EQ(print_config(found), print_config(config)) << json;
  }
}

TEST(HuggingFaceConfig, DamageIsNamed) {
  const auto refuses = [](const std::string& json, const std::string& part) {
    return throws_with<FileError>([&] { parse_hugging_face_config(json, "config.json"); }, part);
  };
  EXPECT_TRUE(refuses("{", "'config.json' is not a JSON object"));
  EXPECT_TRUE(refuses("{}", "'model_type' is missing"));
  EXPECT_TRUE(refuses(R"({"model_type":"bert"})", "found bert, allowed: gpt2, llama"));
  for (const std::string name : {"relu", "gelu_fast", "quick_gelu", "swiglu"})
    EXPECT_TRUE(refuses(
        R"({"model_type":"gpt2","activation_function":")" + name + "\"}",
        "'activation_function': found " + name + ", allowed: gelu, gelu_new, gelu_pytorch_tanh"));
  EXPECT_TRUE(refuses(R"({"model_type":"llama","hidden_size":"x"})", "'num_hidden_layers'"));
  EXPECT_TRUE(refuses(R"({"model_type":"llama","num_hidden_layers":0})", "found 0, allowed: >= 1"));
  EXPECT_TRUE(
      refuses(R"({"model_type":"llama","attention_bias":true})", "'attention_bias': found"));
  EXPECT_TRUE(refuses(R"({"model_type":"llama","num_hidden_layers":1.5})",
                      "'num_hidden_layers': found 1.5, allowed: a whole number"));
}

// transformers takes rope_scaling, where it is not empty, and then nothing of rope_parameters.
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
  for (const std::string both : {"", theirs.c_str()}) {
    EXPECT_TRUE(throws_with<FileError>(
        [&] { parse(both + R"(,"rope_scaling":{"rope_type":"llama3","factor":8})"); },
        "'low_freq_factor' is missing"));
    EXPECT_TRUE(throws_with<FileError>(
        [&] { parse(both + R"(,"rope_scaling":{"rope_type":"yarn","factor":8})"); },
        "'rope_type': found yarn, allowed: default, linear, llama3"));
    EXPECT_EQ(parse(both + R"(,"rope_scaling":{"type":"linear","factor":4})").rope_scaling_factor,
              4);
    EXPECT_TRUE(throws_with<FileError>([&] { parse(both + R"(,"rope_scaling":8)"); },
                                       "'rope_scaling': found 8, allowed: an object"));
  }
}

/// A config.json of `type` with keys beside those that every one has.
TransformerConfig parse_family(const std::string& type, const std::string& keys) {
  return parse_hugging_face_config(
      R"({"num_hidden_layers":4,"hidden_size":32,"num_attention_heads":32,"intermediate_size":48,)"
      R"("max_position_embeddings":16,"vocab_size":64,"head_dim":4,"model_type":")" +
          type + "\"" + keys + "}",
      "config.json");
}

// As the classes of transformers 5.23 have them.
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
  EXPECT_EQ(parse_family("qwen3_moe", on + "2").window_size, 6);  // which it does not read
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

}  // namespace
}  // namespace lockstep
