#include "lockstep/core/tensor_parallel_rules.h"

#include <gtest/gtest.h>

#include "lockstep/core/config_io.h"
#include "lockstep/core/error.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::throws_with;

TEST(PaddedVocabSize, G82IsAMultipleForEveryRank) {
  EXPECT_EQ(padded_vocab_size(50257, 128, 1), 50304);
  EXPECT_EQ(padded_vocab_size(50257, 128, 8), 51200);
  EXPECT_EQ(padded_vocab_size(32000, 128, 4), 32256);
  EXPECT_EQ(padded_vocab_size(1, 128, 2), 256);
  EXPECT_EQ(padded_vocab_size(256, 1, 1), 256);
  EXPECT_EQ(padded_vocab_size(256, 1, 3), 258);
  EXPECT_TRUE(
      throws_with<UsageError>([] { padded_vocab_size(int64_t{1} << 62, 3, int64_t{1} << 62); },
                              "does not fit into 64 bits"));
}

constexpr const char* kModel = R"(
  model { hidden_size: 48 num_attention_heads: 12 ffn_hidden_size: 60 seq_length: 24 }
)";

void parse_model(std::vector<std::string> overrides) { parse_config(kModel, "model", overrides); }

TEST(TensorParallelRules, TheFeedForwardSizeCountsOnlyWhereALayerIsDense) {
  const std::vector<std::string> odd = {"parallel.tensor_model_parallel_size=4",
                                        "model.ffn_hidden_size=62", "model.num_experts=4",
                                        "model.moe_ffn_hidden_size=16", "model.num_layers=2"};
  EXPECT_NO_THROW(parse_model(odd));
  std::vector<std::string> mixed = odd;
  mixed.push_back("model.moe_layer_freq=[0,1]");
  EXPECT_TRUE(throws_with<ConfigError>([&] { parse_model(mixed); },
                                       "model.ffn_hidden_size (62) must be divisible by "));
}

TEST(TensorParallelRules, ErrorsNameTheFieldsThatDoNotDivide) {
  const auto tensor = [](int ranks) {
    return "parallel.tensor_model_parallel_size=" + std::to_string(ranks);
  };
  struct Case {
    std::vector<std::string> overrides;
    const char* part;
  };
  const std::vector<Case> cases = {
      {{tensor(5)}, "model.num_attention_heads (12) must be divisible by "},
      {{tensor(4), "model.ffn_hidden_size=62"}, "model.ffn_hidden_size (62) must be divisible by "},
      {{tensor(4), "model.num_query_groups=6"},
       "model.num_query_groups: found 6, allowed: a multiple or a divisor of "
       "parallel.tensor_model_parallel_size (4)"},
      {{tensor(12), "model.num_query_groups=2", "model.kv_channels=2"},
       "model.kv_channels: found 2, so that a query group has 16 rows of linear_qkv, allowed: rows "
       "that divide by the 6 ranks"},
      {{tensor(2), "model.num_query_groups=1", "model.kv_channels=4611686018427387904"},
       "model.kv_channels: 14 * 4611686018427387904 does not fit into 64 bits"},
      {{"parallel.sequence_parallel=true"},
       "parallel.sequence_parallel: found true, which needs "
       "parallel.tensor_model_parallel_size > 1 (found 1)"},
      {{"parallel.tp_comm_overlap=true"},
       "parallel.tp_comm_overlap: found true, which needs "
       "parallel.tensor_model_parallel_size > 1 (found 1)"},
      {{tensor(2), "parallel.sequence_parallel=true", "model.seq_length=25"},
       "model.seq_length: found 25, allowed with parallel.sequence_parallel: a multiple of"},
      {{tensor(2), "model.distribute_saved_activations=true"},
       "model.distribute_saved_activations: found true, which needs model.recompute_granularity "
       "= full (found none)"},
      {{"model.recompute_granularity=full", "model.distribute_saved_activations=true"},
       "model.distribute_saved_activations: found true, which needs "
       "parallel.tensor_model_parallel_size > 1 (found 1)"},
      {{tensor(2), "model.recompute_granularity=full", "parallel.sequence_parallel=true",
        "model.distribute_saved_activations=true"},
       "needs parallel.sequence_parallel = false"},
      {{tensor(4), "model.hidden_size=50", "model.kv_channels=4",
        "model.recompute_granularity=full", "model.distribute_saved_activations=true"},
       "model.hidden_size (50) must be divisible by "},
  };
  for (const Case& broken : cases)
    EXPECT_TRUE(throws_with<ConfigError>([&] { parse_model(broken.overrides); }, broken.part));
}

TEST(TensorParallelRules, WhatFitsPasses) {
  for (const char* ranks : {"1", "2", "3", "4", "6", "12"})
    EXPECT_NO_THROW(parse_model({std::string("parallel.tensor_model_parallel_size=") + ranks}))
        << ranks;
  EXPECT_NO_THROW(parse_model({"parallel.tensor_model_parallel_size=6", "model.num_query_groups=2",
                               "model.kv_channels=6"}));
  EXPECT_NO_THROW(parse_model({"parallel.tensor_model_parallel_size=4", "model.num_query_groups=12",
                               "parallel.sequence_parallel=true"}));
  EXPECT_NO_THROW(
      parse_model({"parallel.tensor_model_parallel_size=2", "parallel.tp_comm_overlap=true"}));
  EXPECT_NO_THROW(parse_model({"parallel.tensor_model_parallel_size=4", "model.vocab_size=3"}));
}

TEST(Fp8Rules, LatentsNeedMultiplesOf16TokensOnEachRankOfSequenceParallelism) {
  const std::string latent = "model.multi_latent_attention=true",
                    sequence = "parallel.sequence_parallel=true";
  const auto parse = [](std::vector<std::string> fields) {
    for (const char* field : {"train.precision=bf16", "train.fp8=hybrid", "model.seq_length=144",
                              "parallel.tensor_model_parallel_size=2"})
      fields.emplace_back(field);
    parse_config("", "latent", fields);
  };
  EXPECT_TRUE(throws_with<ConfigError>(
      [&] {
        parse({latent, sequence, "train.micro_batch_size=1"});
      },
      "model.seq_length: found 144, so that a rank of tp has 72 tokens of a micro-batch, allowed "
      "with train.fp8, model.multi_latent_attention and parallel.sequence_parallel: multiples of "
      "16"));
  EXPECT_TRUE(throws_with<ConfigError>(
      [&] {
        parse({latent, sequence, "train.micro_batch_size=200000000000000000"});
      },
      "train.micro_batch_size: 72 * 200000000000000000 does not fit into 64 bits"));
  EXPECT_NO_THROW(parse({latent, sequence, "train.micro_batch_size=2"}));
  EXPECT_NO_THROW(parse({latent, "train.micro_batch_size=1"}));
  EXPECT_NO_THROW(parse({sequence, "train.micro_batch_size=1"}));
}

}  // namespace
}  // namespace lockstep
