// The operations of a model against Megatron's own function and against sums written out by hand.

#include "lockstep/planner/model_flops.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "lockstep/core/config_io.h"
#include "lockstep/planner/device_peak.h"

namespace lockstep {
namespace {

/// 2 layers of width 64 with 4 heads, 1,024 token ids, sequences of 128.
Config flops_model(const std::vector<std::string>& overrides) {
  return parse_config(
      "model { num_layers: 2 hidden_size: 64 ffn_hidden_size: 256 num_attention_heads: 4 "
      "vocab_size: 1024 seq_length: 128 activation: \"gelu\" } train { device: \"cpu\" }",
      "test", overrides);
}

constexpr double kTokens = 4 * 128;  // of a batch of 4

/// Multiplications of attention for a token that sees 128 / 2 others: scores and values, both 64
/// wide, in 2 layers.
constexpr double kAttention = 2 * (2 * 64) * 64;

TEST(ModelFlops, G121ADenseModel) {
  const double linear_qkv = 64 * (3 * 64), linear_proj = 64 * 64, mlp = 2 * 64 * 256;
  const double elements = 2 * (linear_qkv + linear_proj + mlp) + 64 * 1024;
  const double found = model_flops_per_token(flops_model({}));
  EXPECT_EQ(found, 6 * (elements + kAttention));
  EXPECT_EQ(found * kTokens, 553'648'128);
}

TEST(ModelFlops, G121GroupedQueriesAndAGate) {
  // 2 key and 2 value heads of 16 channels; three matrices of width 172.
  const double linear_qkv = 64 * (64 + 2 * 32), linear_proj = 64 * 64, mlp = 3 * 64 * 172;
  const double elements = 2 * (linear_qkv + linear_proj + mlp) + 64 * 1024;
  const double found = model_flops_per_token(flops_model(
      {"model.num_query_groups=2", "model.activation=swiglu", "model.ffn_hidden_size=172"}));
  EXPECT_EQ(found, 6 * (elements + kAttention));
  EXPECT_EQ(found * kTokens, 530'055'168);
}

TEST(ModelFlops, G121ExpertsCountAsOftenAsATokenMeetsThem) {
  const double found =
      model_flops_per_token(flops_model({"model.num_experts=4", "model.moe_router_topk=2"}));
  const double attention = 64 * (3 * 64) + 64 * 64, experts = 2 * (2 * 64 * 256);
  EXPECT_EQ(found, 6 * (2 * (attention + experts) + 64 * 1024 + kAttention));
  EXPECT_EQ(found * kTokens, 754'974'720);
}

TEST(ModelFlops, FrozenMatricesHaveNoProductForTheirGradients) {
  const double found = model_flops_per_token(flops_model({"lora.rank=5"}));
  const double linear_qkv = 64 * (3 * 64), linear_proj = 64 * 64, mlp = 2 * 64 * 256;
  const double frozen = 2 * (linear_qkv + linear_proj + mlp) + 64 * 1024;
  const double adapters = 2 * 5 * ((64 + 3 * 64) + (64 + 64));
  EXPECT_EQ(found, 4 * frozen + 6 * (adapters + kAttention));
}

TEST(ModelFlops, DenseLayersAmongThoseWithExpertsAndASharedExpert) {
  const double found = model_flops_per_token(flops_model(
      {"model.num_experts=8", "model.moe_router_topk=3", "model.moe_layer_freq=[0,1]",
       "model.moe_ffn_hidden_size=40", "model.moe_shared_expert_intermediate_size=96"}));
  const double attention = 64 * (3 * 64) + 64 * 64;
  const double dense = 2 * 64 * 256, experts = 3 * (2 * 64 * 40) + 2 * 64 * 96;
  EXPECT_EQ(found, 6 * (2 * attention + dense + experts + 64 * 1024 + kAttention));
}

TEST(ModelFlops, HeadsNeedNotBeAsWideAsTheModel) {
  // 4 heads of 24 channels: 96 wide. Attention's products are as wide as the heads.
  const double linear_qkv = 64 * (3 * 96), linear_proj = 96 * 64, mlp = 2 * 64 * 256;
  const double elements = 2 * (linear_qkv + linear_proj + mlp) + 64 * 1024;
  EXPECT_EQ(model_flops_per_token(flops_model({"model.kv_channels=24"})),
            6 * (elements + 2 * (2 * 96) * 64));
}

TEST(ModelFlops, LatentAttentionHasFiveMatricesAndTwoWidths) {
  // 4 heads of 10 + 6 channels for queries and keys and 12 for values.
  const Config config = flops_model({"model.multi_latent_attention=true", "model.q_lora_rank=20",
                                     "model.kv_lora_rank=24", "model.qk_head_dim=10",
                                     "model.qk_pos_emb_head_dim=6", "model.v_head_dim=12"});
  const double queries = 64 * 20 + 20 * (4 * 16), proj = 48 * 64, mlp = 2 * 64 * 256;
  const double keys_and_values = 64 * (24 + 6) + 24 * (4 * (10 + 12)), core = (64 + 48) * 64;
  EXPECT_EQ(model_flops_per_token(config),
            6 * (2 * (queries + keys_and_values + proj + mlp + core) + 64 * 1024));
  Config plain = config;
  plain.model.q_lora_rank.reset();
  EXPECT_EQ(model_flops_per_token(config) - model_flops_per_token(plain),
            6 * 2 * (queries - 64 * 64));
}

TEST(ModelFlops, AWindowHidesTokensFromThoseBehindIt) {
  const double plain = model_flops_per_token(flops_model({}));
  // A window of 32 of 128: the first 32 tokens see 16 on average, the other 96 see 32.
  const double seen = (32 * 16 + 96 * 32) / 128.0;
  EXPECT_EQ(model_flops_per_token(flops_model({"model.window_size=32"})),
            plain - 6 * (kAttention - 2 * (2 * 64) * seen));
  EXPECT_EQ(model_flops_per_token(flops_model({"model.window_size=128"})), plain);
  EXPECT_EQ(model_flops_per_token(flops_model({"model.window_size=1000"})), plain);
}

TEST(ModelFlops, RecomputationDoesNotCountAndPaddingOfTheVocabularyDoes) {
  const double plain = model_flops_per_token(flops_model({}));
  EXPECT_EQ(model_flops_per_token(flops_model({"model.recompute_granularity=full"})), plain);
  EXPECT_EQ(model_flops_per_token(flops_model({"model.make_vocab_size_divisible_by=300",
                                               "parallel.tensor_model_parallel_size=2"})),
            plain + 6 * 64 * (1200 - 1024));
}

TEST(ModelFlops, G121Gpt3) {
  const Config config = flops_model({"model.num_layers=96", "model.hidden_size=12288",
                                     "model.ffn_hidden_size=49152", "model.num_attention_heads=96",
                                     "model.seq_length=2048", "model.vocab_size=51200"});
  EXPECT_NEAR(model_flops_per_token(config) * 1536 * 2048 / 3.3405978e18, 1, 1e-7);
}

TEST(DevicePeak, IsKnownForNamedModelsInHalfPrecision) {
  EXPECT_EQ(peak_tflops("NVIDIA H100 80GB HBM3", Precision::bf16), 989);
  EXPECT_EQ(peak_tflops("NVIDIA H100 PCIe", Precision::bf16), 756);
  EXPECT_EQ(peak_tflops("NVIDIA A100-SXM4-40GB", Precision::fp16), 312);
  EXPECT_EQ(peak_tflops("NVIDIA H200", Precision::fp16), 989);
  EXPECT_EQ(peak_tflops("NVIDIA RTX A1000 Laptop GPU", Precision::bf16), std::nullopt);
  EXPECT_EQ(peak_tflops("NVIDIA B200", Precision::bf16), 2250);
  EXPECT_EQ(peak_tflops("NVIDIA H100 80GB HBM3", Precision::fp32), std::nullopt);
  EXPECT_EQ(peak_tflops("NVIDIA GB200", Precision::bf16), std::nullopt);
  EXPECT_EQ(peak_tflops("NVIDIA GeForce RTX 4090", Precision::bf16), std::nullopt);
  EXPECT_EQ(peak_tflops("", Precision::bf16), std::nullopt);
}

}  // namespace
}  // namespace lockstep
