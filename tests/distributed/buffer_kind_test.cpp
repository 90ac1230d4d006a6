#include "lockstep/distributed/buffer_kind.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

using enum MeshAxis;
using Axes = std::vector<MeshAxis>;

constexpr auto kSum = GradientState::partial_sum;
const RankGrids kGrids({.world_size = 8, .tensor = 2, .pipeline = 2, .expert = 2});

BufferKind kind_of(const ParamDescription& description, MatrixLayout matrices = MatrixLayout::cut,
                   const std::vector<GroupKind>& unlike = {}) {
  return buffer_kind(description, kGrids, matrices, unlike);
}

TEST(BufferKind, DenseAndExpertsLieApart) {
  EXPECT_EQ(kind_of({}), (BufferKind{.replicas = GroupKind::dp_cp}));
  EXPECT_EQ(kind_of({.is_expert = true}), (BufferKind{.replicas = GroupKind::expert_dp}));
  EXPECT_EQ(kind_of({.placements = {{tp, Shard{0}}}, .apply_weight_decay = false}), kind_of({}));
}

TEST(BufferKind, MatricesLieApartOnlyWhereTheyLieWhole) {
  const ParamDescription matrix{.update = ParamUpdate::matrix};
  EXPECT_EQ(kind_of(matrix), kind_of({}));
  EXPECT_TRUE(kind_of(matrix, MatrixLayout::whole).whole_matrices);
  EXPECT_FALSE(kind_of({}, MatrixLayout::whole).whole_matrices);
  EXPECT_FALSE(lies_whole(matrix, MatrixLayout::cut));
}

TEST(BufferKind, TermsOfOtherStagesAndOfUnlikeLayoutsLieApart) {
  EXPECT_EQ(kind_of({.gradient_states = {{pp, kSum}}}).apart, Axes{pp});
  EXPECT_EQ(kind_of({.gradient_states = {{tp, kSum}, {pp, kSum}}}).apart, (Axes{tp, pp}));
  const ParamDescription norm{.gradient_states = {{tp, kSum}}};
  EXPECT_EQ(kind_of(norm).apart, Axes());
  EXPECT_EQ(kind_of(norm, MatrixLayout::cut, {GroupKind::expert_dp}).apart, Axes());
  EXPECT_EQ(kind_of(norm, MatrixLayout::cut, {GroupKind::dp_cp}).apart, Axes{tp});
  EXPECT_EQ(kind_of({}, MatrixLayout::cut, {GroupKind::dp_cp}).apart, Axes());
}

TEST(BufferKind, OnlySixteenBitGradientsBecomeWider) {
  for (const int64_t bytes : {1, 2, 4, 8}) EXPECT_EQ(grad_element_bytes(bytes, false), bytes);
  EXPECT_EQ(grad_element_bytes(1, true), 1);
  EXPECT_EQ(grad_element_bytes(2, true), 4);
  EXPECT_EQ(grad_element_bytes(4, true), 4);
  EXPECT_EQ(grad_element_bytes(8, true), 8);
}

TEST(BufferKind, OnlyTheFirstChunkOfTheFirstStageHasBuckets) {
  EXPECT_TRUE(has_buckets(0, 0));
  EXPECT_FALSE(has_buckets(1, 0));
  EXPECT_FALSE(has_buckets(0, 1));
}

TEST(BufferKind, CopiesOnSeveralStagesLieAloneInTheirBucket) {
  const auto alone = [](const ParamDescription& description) {
    return layout_param(description, {3, 4}, 12).shared_embedding;
  };
  EXPECT_FALSE(alone({}));
  EXPECT_TRUE(alone({.stages = StageCopies::all}));
  EXPECT_TRUE(alone({.gradient_states = {{pp, kSum}}}));
  for (const TiedStages stages : {TiedStages::all, TiedStages::first_and_last, TiedStages::first})
    EXPECT_TRUE(alone({.tie = Tie{"e", stages}}));
}

TEST(BufferKind, RowsAreAllDimensionsButTheLast) {
  const auto expect = [](const std::vector<int64_t>& shape, int64_t numel, int64_t rows,
                         int64_t columns) {
    const LayoutParam param = layout_param({}, shape, numel);
    EXPECT_EQ(param.numel, numel);
    EXPECT_EQ(param.rows, rows);
    EXPECT_EQ(param.columns, columns);
  };
  expect({2, 3, 5}, 30, 6, 5);
  expect({7}, 7, 0, 0);
  expect({}, 1, 0, 0);
  expect({4, 0}, 0, 0, 0);
}

TEST(BufferKind, TheLayoutFollowsConfigurationAndRanks) {
  DistributedDataParallelConfig config;
  config.bucket_size = 100;
  config.pad_buckets_for_high_nccl_busbw = true;
  const RankGrids two_instances({.world_size = 8, .optimizer_instances = 2});
  const auto options = [&](bool bucketed) {
    return layout_options(config, two_instances, {.whole_matrices = true}, {}, 1000, bucketed);
  };
  EXPECT_EQ(options(true).data_parallel_size, 8);
  config.use_distributed_optimizer = true;
  EXPECT_EQ(options(true).data_parallel_size, 4);
  EXPECT_EQ(options(true).bucket_size, 100);
  EXPECT_EQ(options(false).bucket_size, std::nullopt);
  EXPECT_TRUE(options(true).distributed_optimizer);
  EXPECT_TRUE(options(true).pad_for_high_bus_bandwidth);
  EXPECT_TRUE(options(true).whole_parameters);
}

}  // namespace
}  // namespace lockstep
