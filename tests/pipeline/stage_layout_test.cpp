#include "lockstep/pipeline/stage_layout.h"

#include <gtest/gtest.h>

#include "lockstep/core/error.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using enum LayerKind;
using testing::throws_with;

::testing::AssertionResult parse_refused(const std::string& text, const std::string& part) {
  return throws_with<ConfigError>([&] { parse_stage_layout(text, 2); }, part);
}

TEST(StageLayout, G89LayersOfRanksAndChunks) {
  const auto t = transformer;
  const StageLayout layout({{embedding}, {t}, {t, t}, {t}, {}, {t}, {t}, {t, t, loss}}, 4);
  layout.validate(8);
  EXPECT_EQ(layout.chunks(), 2);
  std::vector<std::vector<std::vector<int64_t>>> numbers(4);  // from 1, as in Megatron Core
  for (int64_t rank = 0; rank < 4; ++rank)
    for (int64_t chunk = 0; chunk < 2; ++chunk) {
      auto& ours = numbers[static_cast<size_t>(rank)].emplace_back();
      const LayerRange layers = layout.layers(rank, chunk);
      for (int64_t layer = layers.begin; layer < layers.end; ++layer) ours.push_back(layer + 1);
    }
  EXPECT_EQ(numbers, (std::vector<std::vector<std::vector<int64_t>>>{
                         {{}, {}}, {{1}, {5}}, {{2, 3}, {6}}, {{4}, {7, 8}}}));
  EXPECT_TRUE(layout.has_embedding(0, 0));
  EXPECT_FALSE(layout.has_embedding(0, 1));
  EXPECT_TRUE(layout.has_loss(3, 1));
  EXPECT_FALSE(layout.has_loss(3, 0));
  EXPECT_EQ(layout.stage(2, 0), (std::vector<LayerKind>{t, t}));
  EXPECT_THROW(layout.layers(4, 0), UsageError);
  EXPECT_THROW(layout.stage(0, 2), UsageError);
}

TEST(StageLayout, G90Texts) {
  const auto text = [](const std::string& layout, int64_t pipeline) {
    return parse_stage_layout(layout, pipeline).to_string();
  };
  EXPECT_EQ(text("Et|t*4|t|tL", 4), "Et|tttt|t|tL");
  EXPECT_EQ(text("E|t*6|t|L", 2), "E|tttttt|t|L");
  EXPECT_EQ(text("E|t|t*2|t||(t|)*2,t*2,L", 4), "E|t|tt|t||t|t|ttL");
  EXPECT_EQ(text("E((t|)*2,t)*2L", 1), "Et|t|tt|t|tL") << "groups may stand in groups";
  const StageLayout deep = parse_stage_layout("Et*3|(tt|)*29,m|L", 16);
  EXPECT_EQ(deep.chunks(), 2);
  EXPECT_EQ(deep.num_layers(), 61);
  deep.validate(61, 1);
}

TEST(StageLayout, TextsThatAreWrongAreRefusedWithThePlace) {
  EXPECT_TRUE(parse_refused("Et|xL", "pipeline layout 'Et|xL', position 3: found 'x', allowed: E"));
  EXPECT_TRUE(parse_refused("Et|t L", "position 4: found ' '"));
  EXPECT_TRUE(parse_refused("Et*0|ttL", "position 3: found '0', allowed: a number from 1 to"));
  EXPECT_TRUE(parse_refused("Et*123456|L", "position 3: found '1', allowed: a number from 1 to"));
  EXPECT_TRUE(parse_refused("E(t|L", "position 5: found its end, allowed: a ')'"));
  EXPECT_TRUE(parse_refused("Et)|L", "position 2: found ')'"));
  EXPECT_TRUE(parse_refused("E()*2|L", "position 2: found ')', allowed: a group"));
  EXPECT_TRUE(parse_refused("E(t|)L", "position 5: found 'L', allowed: '*' and a number"));
  EXPECT_TRUE(parse_refused("Et*|L", "position 3: found '|', allowed: a number from 1 to 99999"));
  EXPECT_TRUE(parse_refused("E*2*2|L", "position 3: found '*'"));
  EXPECT_TRUE(parse_refused("((((t*99999)*99999)*99999)*99999)*9", "more than 131072 layers"));
  EXPECT_TRUE(parse_refused("E|t|L",
                            "3 stages, allowed: a multiple of "
                            "pipeline_model_parallel_size (2)"));
}

TEST(StageLayout, WhatAModelNeeds) {
  const auto refused = [](const std::string& text, int64_t layers, int64_t mtp,
                          const std::string& part) {
    return throws_with<ConfigError>([&] { parse_stage_layout(text, 2).validate(layers, mtp); },
                                    part);
  };
  EXPECT_TRUE(refused("Et|tL", 3, 0, "pipeline layout 'Et|tL': found 2 layers (t), allowed: 3"));
  EXPECT_TRUE(refused("t|tL", 2, 0, "found 0 embeddings (E), allowed: 1"));
  EXPECT_TRUE(refused("Et|tLL", 2, 0, "found 2 losses (L), allowed: 1"));
  EXPECT_TRUE(refused("Et|tmL", 2, 0, "found 1 MTP layers (m), allowed: 0"));
  EXPECT_TRUE(refused("tE|tL", 2, 0, "first the embedding (E)"));
  EXPECT_TRUE(refused("Et|Lt", 2, 0, "first the embedding (E)"));
  EXPECT_TRUE(refused("Etm|tL", 2, 1, "first the embedding (E)"));
  EXPECT_TRUE(refused("Ettm|mL", 2, 2, "must stand together"));
  EXPECT_TRUE(refused("Ett|m||L", 2, 1, "must stand together in the last chunk"));
}

TEST(StageLayout, G91EmbeddingAndLossCountedAsLayers) {
  StageLayout layout =
      split_layers({.num_layers = 63, .pipeline = 4, .account_for_loss_in_pipeline_split = true});
  EXPECT_EQ(layout.layers(2, 0).size(), 16);
  EXPECT_EQ(layout.layers(3, 0), (LayerRange{48, 63}));
  LayerSplit both{.num_layers = 62,
                  .pipeline = 4,
                  .account_for_embedding_in_pipeline_split = true,
                  .account_for_loss_in_pipeline_split = true};
  EXPECT_EQ(split_layers(both).layers(0, 0), (LayerRange{0, 15}));
  EXPECT_EQ(split_layers(both).layers(3, 0), (LayerRange{47, 62}));
  both.virtual_pipeline = 2;
  EXPECT_EQ(split_layers(both).layers(0, 1), (LayerRange{31, 39}));
  EXPECT_EQ(split_layers(both).layers(3, 1), (LayerRange{55, 62}));
  EXPECT_EQ(split_layers({.num_layers = 5, .num_layers_in_first_pipeline_stage = 5}).to_string(),
            "EtttttL");
}

TEST(StageLayout, SplitsThatDoNotComeOutAreRefusedByName) {
  const auto refused = [](const LayerSplit& split, const std::string& part) {
    return throws_with<ConfigError>([&] { split_layers(split); }, part);
  };
  EXPECT_TRUE(refused({.num_layers = 0}, "num_layers: found 0, allowed: 1 to 131072"));
  EXPECT_TRUE(refused({.pipeline = 0}, "pipeline_model_parallel_size: found 0"));
  EXPECT_TRUE(refused({.pipeline = 1 << 16, .virtual_pipeline = 1 << 16},
                      "virtual_pipeline_model_parallel_size: found 4294967296"));
  EXPECT_TRUE(refused({.num_layers = 6, .pipeline = 4},
                      "num_layers (6) must be divisible by pipeline_model_parallel_size (4)"));
  EXPECT_TRUE(
      refused({.num_layers = 6, .pipeline = 4, .account_for_embedding_in_pipeline_split = true},
              "num_layers (6) + 1 for the embedding must be divisible"));
  EXPECT_TRUE(refused({.num_layers = 6, .pipeline = 2, .virtual_pipeline = 2},
                      "pipeline rank 0: 3 layers must be divisible by "
                      "virtual_pipeline_model_parallel_size (2)"));
  EXPECT_TRUE(refused({.num_layers = 9, .pipeline = 4, .num_layers_in_last_pipeline_stage = 2},
                      "num_layers (9) leaves 7 for the 3 ranks"));
  EXPECT_TRUE(refused({.num_layers = 2, .pipeline = 4, .num_layers_in_last_pipeline_stage = 3},
                      "num_layers (2) leaves -1 for"));
  EXPECT_TRUE(
      refused({.num_layers_in_first_pipeline_stage = 1, .num_layers_in_last_pipeline_stage = 0},
              "leaves 0 for the -1 ranks"));
  EXPECT_TRUE(refused({.num_layers = 6,
                       .pipeline = 2,
                       .num_layers_in_first_pipeline_stage = 1,
                       .num_layers_in_last_pipeline_stage = 2},
                      "num_layers_in_first_pipeline_stage (1) and "
                      "num_layers_in_last_pipeline_stage (2): found 3 layers on the only stages, "
                      "allowed: num_layers (6)"));
  EXPECT_TRUE(refused({.num_layers = 4,
                       .pipeline = 2,
                       .num_layers_in_first_pipeline_stage = 2,
                       .account_for_loss_in_pipeline_split = true},
                      "allowed: one kind of them"));
  EXPECT_TRUE(refused({.num_layers = 4, .pipeline = 2, .num_layers_in_first_pipeline_stage = -1},
                      "num_layers_in_first_pipeline_stage: found -1"));
}

}  // namespace
}  // namespace lockstep
