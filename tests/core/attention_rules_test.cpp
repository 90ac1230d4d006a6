// Which fields of heads, windows and rotary positions go together.

#include "lockstep/core/attention_rules.h"

#include <gtest/gtest.h>

#include "lockstep/core/config_io.h"
#include "lockstep/core/error.h"

namespace lockstep {
namespace {

std::string attention_refusal(const std::vector<std::string>& overrides) {
  try {
    parse_config("", "x", overrides);
    return "";
  } catch (const ConfigError& error) {
    return error.what();
  }
}

TEST(AttentionRules, FieldsThatNothingWouldReadAreRefused) {
  const std::string none = ", but model.rope_scaling_type is none; it must be ";
  EXPECT_EQ(attention_refusal({"model.rope_scaling_factor=2"}),
            "model.rope_scaling_factor: found 2" + none + "linear, llama3 or yarn");
  EXPECT_EQ(attention_refusal({"model.rope_low_freq_factor=2"}),
            "model.rope_low_freq_factor: found 2" + none + "llama3");
  EXPECT_EQ(attention_refusal({"model.rope_high_freq_factor=3"}),
            "model.rope_high_freq_factor: found 3" + none + "llama3");
  EXPECT_EQ(attention_refusal({"model.rope_original_max_position_embeddings=64"}),
            "model.rope_original_max_position_embeddings: found 64" + none + "llama3 or yarn");
  EXPECT_EQ(
      attention_refusal({"model.rope_scaling_type=linear", "model.rope_high_freq_factor=3"}),
      "model.rope_high_freq_factor: found 3, but model.rope_scaling_type is linear; it must be "
      "llama3");
  EXPECT_EQ(attention_refusal({"model.rope_mscale_all_dim=1"}),
            "model.rope_mscale_all_dim: found 1" + none + "yarn");
  EXPECT_EQ(attention_refusal({"model.rope_scaling_type=llama3", "model.rope_beta_fast=3"}),
            "model.rope_beta_fast: found 3, but model.rope_scaling_type is llama3; it must be "
            "yarn");
  EXPECT_EQ(attention_refusal({"model.v_head_dim=3"}),
            "model.v_head_dim: found 3, which needs model.multi_latent_attention = true");
  EXPECT_EQ(attention_refusal({"model.q_lora_rank=3"}),
            "model.q_lora_rank: found 3, which needs model.multi_latent_attention = true");
}

// 100 * 0.28 and 100 * 0.58 are 28.000000000000004 and 57.99999999999999 in double precision.
TEST(AttentionRules, RoundingDoesNotRefuseAShareOfChannels) {
  for (const auto& [share, channels] : {std::pair("0.14", 14), {"0.28", 28}, {"0.58", 58}}) {
    const Config config = parse_config(
        "", "x", {"model.kv_channels=100", std::string("model.rotary_percent=") + share});
    EXPECT_EQ(rotated_channels(config.model), channels);
  }
}

TEST(AttentionRules, Yarn) {
  const std::string yarn = "model.rope_scaling_type=yarn";
  EXPECT_EQ(attention_refusal({yarn, "model.rope_scaling_factor=4", "model.rope_mscale=0"}), "");
  EXPECT_EQ(attention_refusal({yarn, "model.rope_beta_slow=33"}),
            "model.rope_beta_slow: found 33, allowed: <= model.rope_beta_fast (32)");
  EXPECT_EQ(attention_refusal({yarn, "model.rotary_base=1"}),
            "model.rotary_base: found 1, allowed with model.rope_scaling_type = yarn: > 1");
}

TEST(AttentionRules, LatentAttention) {
  const std::string latent = "model.multi_latent_attention=true";
  const auto refusal = [&](const std::string& field) { return attention_refusal({latent, field}); };
  const std::string beside = ", allowed with model.multi_latent_attention = true: ";
  EXPECT_EQ(parse_config("", "x", {latent}).model.kv_channels, 192);
  EXPECT_EQ(refusal("model.hidden_size=31"), "");  // not a multiple of the heads
  EXPECT_EQ(refusal("model.kv_channels=192"), "");
  EXPECT_EQ(refusal("model.kv_channels=64"), "model.kv_channels: found 64" + beside + "192");
  EXPECT_EQ(refusal("model.num_query_groups=2"), "model.num_query_groups: found 2" + beside + "4");
  EXPECT_EQ(refusal("model.position_embedding_type=none"),
            "model.position_embedding_type: found none" + beside + "rope");
  EXPECT_EQ(refusal("model.rotary_percent=0.5"), "model.rotary_percent: found 0.5" + beside + "1");
  EXPECT_EQ(refusal("model.add_bias_linear=true"),
            "model.add_bias_linear: found true" + beside + "false");
  EXPECT_EQ(refusal("model.add_qkv_bias=true"),
            "model.add_qkv_bias: found true" + beside + "false");
  EXPECT_EQ(refusal("model.qk_pos_emb_head_dim=7"),
            "model.qk_pos_emb_head_dim: found 7, allowed: an even number of channels");
  EXPECT_EQ(refusal("model.qk_head_dim=9223372036854775807"),
            "model.qk_head_dim: found 9223372036854775807, allowed beside "
            "model.qk_pos_emb_head_dim (64): <= 9223372036854775743");
}

TEST(AttentionRules, WhatGoesTogether) {
  const std::string llama3 = "model.rope_scaling_type=llama3";
  EXPECT_EQ(attention_refusal({llama3, "model.rope_scaling_factor=32"}), "");
  EXPECT_EQ(attention_refusal({"model.rope_scaling_type=linear", "model.rope_scaling_factor=2"}),
            "");
  EXPECT_EQ(attention_refusal({llama3, "model.rope_low_freq_factor=4"}),
            "model.rope_low_freq_factor: found 4, allowed: < model.rope_high_freq_factor (4)");
  EXPECT_EQ(attention_refusal({llama3, "model.position_embedding_type=none"}),
            "model.rope_scaling_type: found llama3, allowed with model.position_embedding_type = "
            "none: none");
  EXPECT_EQ(attention_refusal({"model.window_size=1", "model.qk_layernorm=true"}), "");
  EXPECT_NE(attention_refusal({"model.window_size=0"}), "");
}

}  // namespace
}  // namespace lockstep
