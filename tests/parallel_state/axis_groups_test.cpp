// The table from descriptions to groups, compared with hand-written lists of ranks.

#include "lockstep/parallel_state/axis_groups.h"

#include <gtest/gtest.h>

#include "lockstep/core/error.h"

namespace lockstep {
namespace {

using M = MeshAxis;
using K = GroupKind;
using Axes = std::vector<MeshAxis>;
using Kinds = std::vector<GroupKind>;

constexpr auto kSum = GradientState::partial_sum;
const ParamDescription kDenseParam, kExpertParam{.is_expert = true};

/// Dense: tp is bit 0 of the rank, dp bit 1, pp bit 2. Experts: ep is bit 0, edp bit 1, pp bit 2.
const RankGrids kEight(
    {.world_size = 8, .tensor = 2, .pipeline = 2, .expert = 2, .expert_tensor = 1});

RankList first_holders(const ParamDescription& description, const RankGrids& grids) {
  RankList ranks;
  for (int64_t rank = 0; rank < grids.sizes().world_size; ++rank)
    if (is_first_holder(description, grids, rank)) ranks.push_back(rank);
  return ranks;
}

TEST(AxisGroups, EachAxisHasAKindWhoseRanksFollowEachOtherAlongIt) {
  EXPECT_EQ(group_kind_of(M::tp), K::tp);
  EXPECT_EQ(group_kind_of(M::cp), K::cp);
  EXPECT_EQ(group_kind_of(M::dp), K::dp);
  EXPECT_EQ(group_kind_of(M::pp), K::pp);
  EXPECT_EQ(group_kind_of(M::etp), K::expert_tp);
  EXPECT_EQ(group_kind_of(M::ep), K::ep);
  EXPECT_EQ(group_kind_of(M::edp), K::expert_dp);
}

TEST(AxisGroups, TheReductionOverReplicasCoversTheAxesThatSplitTheBatch) {
  EXPECT_EQ(batch_axes(kDenseParam), (Axes{M::cp, M::dp}));
  EXPECT_EQ(batch_axes(kExpertParam), (Axes{M::edp}));
  EXPECT_EQ(model_axes(kDenseParam), (Axes{M::tp, M::pp}));
  EXPECT_EQ(model_axes(kExpertParam), (Axes{M::etp, M::ep, M::pp}));
  EXPECT_EQ(tensor_axis(kDenseParam), M::tp);
  EXPECT_EQ(tensor_axis(kExpertParam), M::etp);
  EXPECT_EQ(replicas(kDenseParam), K::dp_cp);
  EXPECT_EQ(replicas(kExpertParam), K::expert_dp);
  EXPECT_EQ(model_ranks(kDenseParam), K::tp_pp);
  EXPECT_EQ(model_ranks(kExpertParam), K::tp_ep_pp);
  EXPECT_EQ(kinds_that_reach_all_ranks(), (Kinds{K::dp_cp, K::tp, K::pp}));
}

TEST(AxisGroups, ShardedReductionsStayInsideAnOptimizerInstance) {
  const auto expect = [](const ParamDescription& description, int64_t instances, bool sharded,
                         K group, std::optional<K> over) {
    const RankGrids grids({.world_size = 8, .expert = 2, .optimizer_instances = instances});
    const ReductionKinds kinds = reduction_group(description, grids, sharded);
    EXPECT_EQ(kinds.group, group);
    EXPECT_EQ(kinds.instances, over);
  };
  for (const bool sharded : {false, true}) {
    expect(kDenseParam, 1, sharded, K::dp_cp, {});
    expect(kExpertParam, 1, sharded, K::expert_dp, {});
  }
  expect(kDenseParam, 2, false, K::dp_cp, {});
  expect(kExpertParam, 2, false, K::expert_dp, {});
  expect(kDenseParam, 2, true, K::intra_dp_cp, K::inter_optimizer);
  expect(kExpertParam, 2, true, K::intra_expert_dp, K::inter_optimizer);
}

TEST(AxisGroups, OptimizerInstancesAreTheSameForDenseParametersAndExpertsOrRefused) {
  const auto refusal = [](const ParallelSizes& sizes) -> std::string {
    try {
      check_optimizer_instances(RankGrids(sizes));
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(refusal({.world_size = 8, .tensor = 2, .expert = 2, .optimizer_instances = 2}), "");
  EXPECT_EQ(refusal({.world_size = 4, .expert = 2, .order = "tp-cp-dp-ep-pp"}), "");
  EXPECT_EQ(
      refusal({.world_size = 4, .expert = 2, .order = "tp-cp-dp-ep-pp", .optimizer_instances = 2}),
      "order 'tp-cp-dp-ep-pp': with 2 optimizer instances ranks 0, 2 have the same shard of "
      "dense parameters, and ranks 0, 1 the same shard of experts; allowed: an order in "
      "which these are the same, such as tp-cp-ep-dp-pp");
  EXPECT_TRUE(refusal({.world_size = 4,
                       .tensor = 2,
                       .context = 2,
                       .order = "cp-tp-dp-pp",
                       .optimizer_instances = 2})
                  .starts_with("order 'cp-tp-dp-pp': with 2 optimizer instances"));
}

TEST(AxisGroups, PartialAxesAreThoseThatAreDeclaredAndHaveSeveralRanks) {
  const ParamDescription norm{.gradient_states = {{M::tp, kSum}, {M::pp, kSum}}};
  EXPECT_EQ(partial_axes(norm, kEight), (Axes{M::tp, M::pp}));
  EXPECT_EQ(partial_axes(norm, RankGrids({.world_size = 4, .tensor = 2})), (Axes{M::tp}));
  EXPECT_EQ(partial_axes(kDenseParam, kEight), Axes());
  const ParamDescription scale{.gradient_states = {{M::etp, kSum}, {M::ep, kSum}},
                               .is_expert = true};
  EXPECT_EQ(partial_axes(scale, kEight), (Axes{M::ep}));  // etp has one rank
}

TEST(AxisGroups, TheFirstOfThoseThatHoldTheSameCountsIt) {
  // Replicas differ in bit 1 and are all first holders: their parts are sharded, or equal.
  EXPECT_EQ(first_holders({.placements = {{M::tp, Shard{0}}}}, kEight),
            (RankList{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(first_holders({}, kEight), (RankList{0, 2, 4, 6}));
  EXPECT_EQ(first_holders({.stages = StageCopies::all}, kEight), (RankList{0, 2}));
  EXPECT_EQ(first_holders({.gradient_states = {{M::pp, kSum}}}, kEight), (RankList{0, 2}));
  EXPECT_EQ(first_holders({.gradient_states = {{M::tp, kSum}}}, kEight), (RankList{0, 2, 4, 6}));
  EXPECT_EQ(first_holders({.placements = {{M::tp, Shard{0}}}, .stages = StageCopies::all}, kEight),
            (RankList{0, 1, 2, 3}));
  for (const TiedStages stages : {TiedStages::all, TiedStages::first_and_last, TiedStages::first})
    EXPECT_EQ(first_holders({.placements = {{M::tp, Shard{0}}}, .tie = Tie{"e", stages}}, kEight),
              (RankList{0, 1, 2, 3}));
  EXPECT_EQ(first_holders({.placements = {{M::ep, Shard{0}}}, .is_expert = true}, kEight),
            (RankList{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(first_holders({.is_expert = true}, kEight), (RankList{0, 2, 4, 6}));
  const RankGrids cut({.world_size = 4, .tensor = 2, .expert = 2, .expert_tensor = 2});
  EXPECT_EQ(first_holders({.placements = {{M::etp, Shard{0}}}, .is_expert = true}, cut),
            (RankList{0, 1}));  // etp is bit 0, ep bit 1
}

TEST(AxisGroups, NormsAreOneClassWhereAllParametersHaveTheSameModelRanks) {
  EXPECT_EQ(norm_groups(kEight, 0, /*sharded=*/true), Kinds{K::intra_optimizer});
  EXPECT_EQ(norm_groups(kEight, 3, /*sharded=*/false), Kinds{K::tp_pp});  // {2, 3, 6, 7} for both
  EXPECT_EQ(norm_groups(RankGrids({.world_size = 4, .tensor = 2}), 3, false), Kinds{K::tp_pp});
  EXPECT_EQ(norm_groups(RankGrids({.world_size = 4, .expert = 2}), 3, false),
            (Kinds{K::tp_pp, K::tp_ep_pp}));
}

}  // namespace
}  // namespace lockstep
