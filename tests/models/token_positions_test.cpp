// Arguments that a user's own model passes to layers: unsuitable ones are refused.

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "lockstep/core/config_io.h"
#include "lockstep/core/error.h"
#include "lockstep/models/attention.h"
#include "lockstep/models/key_value_cache.h"
#include "lockstep/models/latent_attention.h"
#include "lockstep/models/moe_layer.h"
#include "lockstep/models/transformer_layer.h"
#include "lockstep/tests/support/gpt_parts.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::small_gpt;
using testing::throws_with;

constexpr int64_t kSequence = 6, kSequences = 2;

LayerContext layer_context_of(const TransformerConfig& config) {
  Config whole;
  whole.model = config;
  return {.config = resolve(whole).model, .options = at::TensorOptions().dtype(at::kDouble)};
}

at::Tensor hidden() { return at::ones({kSequence, kSequences, 16}, at::kDouble); }

TEST(TokenPositionsOfLayers, PositionsThatTheTableLacksAreRefused) {
  const SelfAttention layer(layer_context_of(small_gpt()));
  const auto run = [&](const at::Tensor& positions) {
    TokenPositions tokens;
    tokens.positions = positions;
    return layer.forward(hidden(), tokens);
  };
  EXPECT_TRUE(at::equal(run(at::arange(kSequence)), layer.forward(hidden(), {})));
  EXPECT_TRUE(throws_with<UsageError>([&] { run(at::arange(kSequence) + 3); },
                                      "found position 8, allowed: 0 to 7"));
  EXPECT_TRUE(throws_with<UsageError>([&] { run(at::arange(kSequence, at::kInt)); },
                                      "found positions of Int, allowed: Long"));
}

TEST(TokenPositionsOfLayers, TheHiddenStatesAreOfThreeDimensionsOfTheModelsWidthAndDtype) {
  TransformerConfig experts = small_gpt(), latent = small_gpt();
  experts.num_experts = 2;
  experts.moe_router_topk = 1;
  latent.multi_latent_attention = true;
  latent.num_query_groups.reset();
  latent.kv_lora_rank = 4;
  latent.qk_head_dim = latent.qk_pos_emb_head_dim = latent.v_head_dim = 4;
  LayerContext named = layer_context_of(small_gpt());
  named.name = "decoder.layers.3.";
  const TransformerLayer layer(named);
  const SelfAttention attention(layer_context_of(small_gpt()));
  const LatentAttention latent_attention(layer_context_of(latent));
  const MoELayer mixture(layer_context_of(experts));
  const auto expect_refused = [](const auto& module, const std::string& name) {
    EXPECT_EQ(module.forward(hidden(), {}).sizes(), hidden().sizes());
    for (const at::Tensor& wrong :
         {hidden().flatten(0, 1), hidden().unsqueeze(0), hidden().narrow(-1, 0, 15),
          hidden().to(at::kFloat), at::Tensor(), at::ones({}, at::kDouble)})
      EXPECT_TRUE(
          throws_with<UsageError>([&] { module.forward(wrong, {}); }, name + ": found an "));
    EXPECT_TRUE(throws_with<UsageError>(
        [&] { module.forward(hidden().flatten(0, 1), {}); },
        "found an input [12, 16] of Double, allowed: [sequence, batch, 16] of Double"));
  };
  expect_refused(layer, "decoder.layers.3");
  expect_refused(attention, "attention");
  expect_refused(latent_attention, "attention");
  expect_refused(mixture, "MoELayer");
}

TokenPositions in_documents(const SequenceDocuments& documents) {
  TokenPositions tokens;
  tokens.documents = std::make_shared<const SequenceDocuments>(documents);
  return tokens;
}

void expect_documents_refused(const SelfAttention& layer, const at::Tensor& input,
                              const SequenceDocuments& documents, const std::string& told) {
  EXPECT_TRUE(throws_with<UsageError>([&] { layer.forward(input, in_documents(documents)); },
                                      "attention: documents: found " + told));
}

TEST(TokenPositionsOfLayers, DocumentsAreThoseOfEachSequence) {
  for (const double dropout : {0.0, 0.5}) {
    TransformerConfig config = small_gpt();
    config.attention_dropout = dropout;
    const SelfAttention layer(layer_context_of(config));
    const auto refused = [&](const SequenceDocuments& documents, const std::string& told) {
      expect_documents_refused(layer, hidden(), documents, told);
    };
    refused({{2, 4}}, "those of 1 sequences, allowed: 2");
    refused({{2, 4}, {6}, {3, 3}}, "those of 3 sequences, allowed: 2");
    refused({{2, 2}, {2, 2}}, "4 tokens in all, allowed: 6");
    refused({{2, 4}, {2, 5}}, "7 tokens in all, allowed: 6");
    refused({{4}, {4}}, "4 tokens in all, allowed: 6");
    refused({{6}, {}}, "0 tokens in all, allowed: 6");
    refused({{6}, {6, 0}}, "6 tokens in all, allowed: 6, in documents of >= 1");
    EXPECT_TRUE(
        at::equal(layer.forward(hidden(), in_documents({{6}, {6}})), layer.forward(hidden(), {})));
  }
}

TEST(TokenPositionsOfLayers, DocumentsAreThoseOfAllContextParallelRanks) {
  for (const bool correct : {true, false}) {
    testing::CollectiveLog log;
    testing::run_ranks(
        2,
        [&](const ParallelState& state) {
          LayerContext context = layer_context_of(small_gpt());
          context.parallel.context_parallel_size = 2;
          context.state = state;
          const SelfAttention layer(context);
          const at::Tensor part = at::ones({4, kSequences, 16}, at::kDouble);
          if (!correct) {
            expect_documents_refused(layer, part, {{4}, {4}}, "4 tokens in all, allowed: 8");
            expect_documents_refused(layer, part, {{3, 1}, {4}}, "4 tokens in all, allowed: 8");
            return;
          }
          EXPECT_TRUE(
              at::equal(layer.forward(part, in_documents({{8}, {8}})), layer.forward(part, {})));
        },
        {.sizes = {.context = 2}, .log = &log});
    EXPECT_EQ(log.of_rank(0).empty(), !correct);  // refused before anything is sent
  }
}

TEST(TokenPositionsOfLayers, DocumentsBesideACacheAreRefused) {
  const at::NoGradGuard no_grad;
  const SelfAttention layer(layer_context_of(small_gpt()));
  TokenPositions tokens = in_documents({{6}, {2, 4}});
  tokens.cache = std::make_shared<KeyValueCache>(8);
  EXPECT_TRUE(throws_with<UsageError>([&] { layer.forward(hidden(), tokens); },
                                      "documents: found some beside a cache, allowed: none"));
  tokens.documents = nullptr;
  EXPECT_TRUE(at::equal(layer.forward(hidden(), tokens), layer.forward(hidden(), {})));
}

TEST(TokenPositionsOfLayers, AMapOfPaddingHasTheFormOfTheTokens) {
  TransformerConfig config = small_gpt();
  config.num_experts = 2;
  config.moe_router_topk = 1;
  const MoELayer layer(layer_context_of(config));
  for (const at::Tensor& map : {at::zeros({kSequences, kSequence}, at::kBool),
                                at::zeros({kSequence, kSequences}, at::kLong)}) {
    TokenPositions tokens;
    tokens.padding.map = map;
    EXPECT_TRUE(throws_with<UsageError>([&] { layer.forward(hidden(), tokens); },
                                        ", allowed: [6, 2] of Bool"));
  }
}

}  // namespace
}  // namespace lockstep
