// What a config.json of each of Hugging Face's families with rotary embeddings means.

#include <gtest/gtest.h>

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/checkpoint/hugging_face_config.h"
#include "lockstep/core/error.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::throws_with;

// transformers uses rope_scaling if it is not empty, and then ignores rope_parameters.
TEST(HuggingFaceFamilyConfig, RotaryAnglesAreThoseOfTransformers) {
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
TEST(HuggingFaceFamilyConfig, WhatAMissingKeyMeansDiffersByFamily) {
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

TEST(HuggingFaceFamilyConfig, Biases) {
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

TEST(HuggingFaceFamilyConfig, WhatRotaryFamiliesCannotBeIsNamed) {
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

TEST(HuggingFaceFamilyConfig, AWindowHoldsInAllLayersOrInNone) {
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

// With layer_types, transformers makes a Ministral of a Mistral; a Mixtral ignores them.
TEST(HuggingFaceFamilyConfig, LayerTypesOfMistral) {
  const auto window = [](const std::string& type, const std::string& first) {
    return parse_family(type, R"(,"sliding_window":6,"layer_types":[")" + first +
                                  R"(","full_attention","full_attention","full_attention"])")
        .window_size;
  };
  EXPECT_EQ(window("mistral", "full_attention"), std::nullopt);
  EXPECT_TRUE(throws_with<FileError>([&] { window("mistral", "sliding_attention"); },
                                     "'layer_types': found sliding_attention, full_attention"));
  EXPECT_EQ(window("mixtral", "sliding_attention"), 6);
  EXPECT_EQ(window("mixtral", "full_attention"), 6);
  const std::string all = R"(,"sliding_window":6,"layer_types":["sliding_attention"])";
  EXPECT_EQ(parse_family("mistral", all).window_size, 6);
}

TEST(HuggingFaceFamilyConfig, AttentionIsCausal) {
  for (const std::string type :
       {"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"}) {
    const auto parse = [&](const std::string& value) {
      parse_family(type, R"(,"num_key_value_heads":32,"is_causal":)" + value);
    };
    EXPECT_NO_THROW(parse("true")) << type;
    EXPECT_TRUE(
        throws_with<FileError>([&] { parse("false"); }, "'is_causal': found false, allowed: true"))
        << type;
  }
}

// transformers prefers original_max_position_embeddings outside of the rotary parameters.
TEST(HuggingFaceFamilyConfig, OriginalContextBesideTheRotaryParameters) {
  const auto context = [](bool outside, const std::string& rope) {
    const std::string key = R"("original_max_position_embeddings":)";
    return parse_family("qwen3", R"(,"num_key_value_heads":32)" + (outside ? "," + key + "8" : "") +
                                     R"(,"rope_scaling":{"factor":4.0,)" + key + "12," + rope + "}")
        .rope_original_max_position_embeddings;
  };
  for (const std::string rope :
       {R"("rope_type":"yarn")",
        R"("rope_type":"llama3","low_freq_factor":1,"high_freq_factor":4)"}) {
    EXPECT_EQ(context(true, rope), 8) << rope;
    EXPECT_EQ(context(false, rope), 12) << rope;
  }
}

// The values that transformers 5.23 uses for missing keys, and its factor on cosines and sines.
TEST(HuggingFaceFamilyConfig, Yarn) {
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

TEST(HuggingFaceFamilyConfig, DeepSeek) {
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
  EXPECT_TRUE(refuses(R"("norm_topk_prob":null)", "'norm_topk_prob': found false"));
  EXPECT_TRUE(refuses(R"("rope_interleave":false)", "'rope_interleave': found false"));
  EXPECT_TRUE(refuses(R"("rope_interleave":null)", "'rope_interleave': found false"));
  EXPECT_TRUE(refuses(R"("rms_norm_eps":1e-5)", "'rms_norm_eps': found 1e-05"));
  EXPECT_TRUE(refuses(R"("scoring_func":"softmax")", "'scoring_func': found softmax"));
  EXPECT_TRUE(refuses(R"("n_shared_experts":0)", "'n_shared_experts': found 0, allowed: >= 1"));
  EXPECT_TRUE(refuses(R"("quantization_config":{"quant_method":"fp8"})",
                      "'quantization_config': found quantized weights"));
  EXPECT_TRUE(throws_with<FileError>([] { parse_family("deepseek_v3", ""); },
                                     "'num_key_value_heads': found 128, allowed: 32"));
}

TEST(HuggingFaceFamilyConfig, LayersWithExperts) {
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
