#include "lockstep/parallel_state/rank_grids.h"

#include <gtest/gtest.h>

#include "lockstep/core/error.h"

namespace lockstep {
namespace {

using enum GroupKind;
using Groups = std::vector<RankList>;

Groups all(const RankGroups& set) {
  Groups groups;
  for (int64_t i = 0; i < set.count(); ++i) groups.push_back(set.group(i));
  return groups;
}

Groups all(const RankGrids& grids, GroupKind kind) { return all(grids.groups(kind)); }

/// Consecutive ranks first ... last.
RankList range(int64_t first, int64_t last) {
  RankList ranks;
  for (int64_t rank = first; rank <= last; ++rank) ranks.push_back(rank);
  return ranks;
}

struct GoldenCase {
  const char* name;
  ParallelSizes sizes;
  GroupKind kind;
  Groups groups;
};

const ParallelSizes kG1 = {.world_size = 16, .tensor = 2, .pipeline = 4};
const ParallelSizes kG6 = {.world_size = 8, .tensor = 2, .pipeline = 2};
const ParallelSizes kG8 = {.world_size = 8, .tensor = 2, .context = 2};
const ParallelSizes kG9 = {.world_size = 8, .tensor = 2, .pipeline = 2, .context = 2};
const ParallelSizes kG10 = {.world_size = 16, .tensor = 2, .pipeline = 2, .context = 2};
const ParallelSizes kG11 = {.world_size = 16, .pipeline = 2, .expert = 4};
const ParallelSizes kG12 = {.world_size = 16, .tensor = 2, .pipeline = 2, .expert = 2};
const ParallelSizes kG13 = {.world_size = 8, .expert = 4};
const ParallelSizes kG17 = {.world_size = 8, .optimizer_instances = 2};
const ParallelSizes kG18 = {.world_size = 8, .expert = 2, .optimizer_instances = 2};
const ParallelSizes kG19 = {.world_size = 16, .tensor = 2, .pipeline = 2, .optimizer_instances = 2};
const Groups kPairs16 = {{0, 1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}, {10, 11}, {12, 13}, {14, 15}};
const Groups kQuads16 = {range(0, 3), range(4, 7), range(8, 11), range(12, 15)};
const Groups kStride2 = {{0, 2}, {1, 3}, {4, 6}, {5, 7}};
const Groups kStride4 = {{0, 4}, {1, 5}, {2, 6}, {3, 7}};
const Groups kStride4Twice = {{0, 4}, {1, 5}, {2, 6}, {3, 7}, {8, 12}, {9, 13}, {10, 14}, {11, 15}};

const std::vector<GoldenCase> kGoldenCases = {
    {"G1", kG1, tp, kPairs16},
    {"G2", kG1, pp, {{0, 4, 8, 12}, {1, 5, 9, 13}, {2, 6, 10, 14}, {3, 7, 11, 15}}},
    {"G3", kG1, dp, {{0, 2}, {1, 3}, {4, 6}, {5, 7}, {8, 10}, {9, 11}, {12, 14}, {13, 15}}},
    {"G4", kG1, tp_pp, {{0, 1, 4, 5, 8, 9, 12, 13}, {2, 3, 6, 7, 10, 11, 14, 15}}},
    {"G5", kG1, tp_dp, kQuads16},
    {"G6", kG6, pp, kStride4},
    {"G6", kG6, dp, kStride2},
    {"G6", kG6, tp_pp, {{0, 1, 4, 5}, {2, 3, 6, 7}}},
    {"G8", kG8, cp, kStride2},
    {"G8", kG8, dp, kStride4},
    {"G8", kG8, dp_cp, {{0, 2, 4, 6}, {1, 3, 5, 7}}},
    {"G8", kG8, tp_cp, {range(0, 3), range(4, 7)}},
    {"G8", kG8, tp_dp, {{0, 1, 4, 5}, {2, 3, 6, 7}}},
    {"G8", kG8, tp_dp_cp, {range(0, 7)}},
    {"G9", kG9, pp, kStride4},
    {"G9", kG9, dp, {{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}}},
    {"G9", kG9, dp_cp, kStride2},
    {"G9", kG9, cp, kStride2},
    {"G10", kG10, dp, kStride4Twice},
    {"G10", kG10, dp_cp, {{0, 2, 4, 6}, {1, 3, 5, 7}, {8, 10, 12, 14}, {9, 11, 13, 15}}},
    {"G10", kG10, tp_pp, {{0, 1, 8, 9}, {2, 3, 10, 11}, {4, 5, 12, 13}, {6, 7, 14, 15}}},
    {"G10", kG10, tp_dp_cp, {range(0, 7), range(8, 15)}},
    {"G11", kG11, ep, kQuads16},
    {"G11", kG11, expert_dp, kStride4Twice},
    {"G11", kG11, tp_ep_pp, {{0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}}},
    {"G12", kG12, ep, {{0, 2}, {1, 3}, {4, 6}, {5, 7}, {8, 10}, {9, 11}, {12, 14}, {13, 15}}},
    {"G12", kG12, tp_ep, kQuads16},
    {"G12", kG12, expert_dp, kStride4Twice},
    {"G13", kG13, expert_dp, kStride4},
    {"G13", kG13, tp_ep_pp, {range(0, 3), range(4, 7)}},
    {"G17", kG17, intra_dp_cp, {range(0, 3), range(4, 7)}},
    {"G18", kG18, intra_expert_dp, {{0, 2}, {4, 6}, {1, 3}, {5, 7}}},
    {"G18", kG18, inter_optimizer, {{0, 4}, {2, 6}, {1, 5}, {3, 7}}},
    {"G18", kG18, intra_optimizer, {range(0, 3), range(4, 7)}},
    {"G19", kG19, intra_optimizer, {{0, 1, 8, 9, 2, 3, 10, 11}, {4, 5, 12, 13, 6, 7, 14, 15}}},
};

TEST(RankGrids, GoldenTables) {
  for (const GoldenCase& golden : kGoldenCases)
    EXPECT_EQ(all(RankGrids(golden.sizes), golden.kind), golden.groups)
        << golden.name << " " << to_string(golden.kind);
}

TEST(RankGrids, G16HierarchicalLevels) {
  const RankGrids grids({.world_size = 16, .context = 16, .hierarchical_context = {2, 2, 4}});
  EXPECT_EQ(all(grids.context_level(0)), kPairs16);
  EXPECT_EQ(all(grids.context_level(1)),
            (Groups{{0, 2}, {1, 3}, {4, 6}, {5, 7}, {8, 10}, {9, 11}, {12, 14}, {13, 15}}));
  EXPECT_EQ(all(grids.context_level(2)),
            (Groups{{0, 4, 8, 12}, {1, 5, 9, 13}, {2, 6, 10, 14}, {3, 7, 11, 15}}));
  EXPECT_THROW(grids.context_level(3), UsageError);
}

TEST(RankGrids, HierarchicalContextSplitsEveryContextGroup) {
  const RankGrids grids(
      {.world_size = 16, .tensor = 2, .context = 4, .hierarchical_context = {2, 2}});
  EXPECT_EQ(all(grids.context_level(0)),
            (Groups{{0, 2}, {4, 6}, {1, 3}, {5, 7}, {8, 10}, {12, 14}, {9, 11}, {13, 15}}));
  EXPECT_EQ(all(grids.context_level(1)),
            (Groups{{0, 4}, {2, 6}, {1, 5}, {3, 7}, {8, 12}, {10, 14}, {9, 13}, {11, 15}}));
}

TEST(RankGrids, EmbeddingGroupsAreTheEndsOfThePipelines) {
  const RankGrids grids(kG1);
  EXPECT_EQ(all(grids, embedding), (Groups{{0, 12}, {1, 13}, {2, 14}, {3, 15}}));
  EXPECT_EQ(all(grids, position_embedding), (Groups{{0}, {1}, {2}, {3}}));
  EXPECT_EQ(grids.group_of(embedding, 13), (RankList{1, 13}));
  EXPECT_EQ(grids.group_of(embedding, 5), RankList{});
  EXPECT_EQ(grids.group_of(position_embedding, 12), RankList{});
  const RankGrids one_stage({.world_size = 2});
  EXPECT_EQ(all(one_stage, embedding), (Groups{{0}, {1}}));
}

TEST(RankGrids, OneOptimizerInstance) {
  const RankGrids grids(kG8);
  EXPECT_EQ(all(grids, intra_dp_cp), all(grids, dp_cp));
  EXPECT_EQ(all(grids, intra_expert_dp), all(grids, expert_dp));
  EXPECT_EQ(all(grids, inter_optimizer), Groups{});
  EXPECT_EQ(grids.group_of(inter_optimizer, 0), RankList{});
}

TEST(RankGrids, GroupOfAgreesWithTheListing) {
  for (const GoldenCase& golden : kGoldenCases) {
    const RankGrids grids(golden.sizes);
    for (const GroupKind kind : all_group_kinds())
      for (const RankList& group : all(grids, kind))
        for (const int64_t rank : group)
          ASSERT_EQ(grids.group_of(kind, rank), group) << golden.name << " " << to_string(kind);
  }
}

std::string refusal(const ParallelSizes& sizes) {
  try {
    const RankGrids grids(sizes);
    return "";
  } catch (const ConfigError& error) {
    return error.what();
  }
}

TEST(RankGrids, G24SizesThatCannotBeAreNamed) {
  EXPECT_EQ(refusal({.world_size = 8, .tensor = 3}),
            "world-size (8) is not divisible by tensor (3) x pipeline (1) x context (1)");
  EXPECT_EQ(refusal({.world_size = 8, .pipeline = 1, .virtual_pipeline = 2}),
            "virtual pipeline (2): allowed with a pipeline of more than 1 stage, found 1");
  EXPECT_EQ(refusal({.world_size = 4, .pipeline = 2, .order = "tp-dp"}),
            "order 'tp-dp': lacks axis 'pp', whose size is 2");
  EXPECT_EQ(
      RankGrids({.world_size = 6, .expert = 2, .expert_tensor = 1}).expert_data_parallel_size(), 3);
  EXPECT_EQ(refusal({.world_size = 6, .expert = 2, .optimizer_instances = 2}),
            "optimizer-instances (2) must divide the data-parallel ranks (dp x cp = 6, expert dp = "
            "3)");
}

TEST(RankGrids, OtherSizesThatCannotBeAreNamed) {
  EXPECT_EQ(refusal({.world_size = 0}), "world-size: found 0, allowed: >= 1");
  EXPECT_EQ(refusal({.world_size = 4, .tensor = 0}), "tensor: found 0, allowed: >= 1");
  EXPECT_EQ(refusal({.world_size = 6, .expert = 4}),
            "world-size (6) is not divisible by expert-tensor (1) x expert (4) x pipeline (1)");
  EXPECT_EQ(refusal({.world_size = 8, .context = 4, .hierarchical_context = {2, 3}}),
            "hierarchical-context: found 2,3, allowed: sizes whose product is context (4)");
  EXPECT_EQ(refusal({.world_size = 4, .context = 4, .hierarchical_context = {1 << 30, 1 << 30, 8}}),
            "hierarchical-context: found 1073741824,1073741824,8, allowed: sizes whose product is "
            "context (4)");
  EXPECT_EQ(refusal({.world_size = 4, .pipeline = 2, .virtual_pipeline = 0}),
            "virtual pipeline: found 0, allowed: >= 1");
  EXPECT_EQ(
      refusal({.world_size = int64_t{1} << 62, .tensor = int64_t{1} << 40, .pipeline = 1 << 30}),
      "world-size (4611686018427387904) is not divisible by tensor (1099511627776) x pipeline "
      "(1073741824) x context (1)");
}

TEST(RankGrids, ThePipelineMustLieAlikeInBothGrids) {
  // Dense dp is 4 and expert dp is 2, so a pipeline inside dp would have two different strides.
  const ParallelSizes sizes = {.world_size = 8, .pipeline = 2, .expert = 2, .order = "ep-dp-pp"};
  EXPECT_EQ(refusal(sizes), "");
  ParallelSizes inside = sizes;
  inside.order = "dp-pp-ep";
  EXPECT_TRUE(refusal(inside).starts_with("order 'dp-pp-ep': pp must come last"))
      << refusal(inside);
}

}  // namespace
}  // namespace lockstep
