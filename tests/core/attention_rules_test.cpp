// Which fields of heads, windows and rotary positions go together.

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
  const std::string none = ", but model.rope_scaling_type is none; allowed with: ";
  EXPECT_EQ(attention_refusal({"model.rope_scaling_factor=2"}),
            "model.rope_scaling_factor: found 2" + none + "linear, llama3");
  EXPECT_EQ(attention_refusal({"model.rope_low_freq_factor=2"}),
            "model.rope_low_freq_factor: found 2" + none + "llama3");
  EXPECT_EQ(attention_refusal({"model.rope_high_freq_factor=3"}),
            "model.rope_high_freq_factor: found 3" + none + "llama3");
  EXPECT_EQ(attention_refusal({"model.rope_original_max_position_embeddings=64"}),
            "model.rope_original_max_position_embeddings: found 64" + none + "llama3");
  EXPECT_EQ(attention_refusal({"model.rope_scaling_type=linear", "model.rope_high_freq_factor=3"}),
            "model.rope_high_freq_factor: found 3, but model.rope_scaling_type is linear; allowed "
            "with: llama3");
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
