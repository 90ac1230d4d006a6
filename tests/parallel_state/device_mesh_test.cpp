#include "lockstep/parallel_state/device_mesh.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/core/placement.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::run_ranks;
using testing::throws_with;

TEST(DeviceMesh, GroupsAndCoordinatesOfAMeshByHand) {
  run_ranks(8, [](const ParallelState& state) {
    const DeviceMesh mesh(state, {2, 2, 2}, {"dp", "cp", "tp"});
    const int64_t rank = state.rank();
    EXPECT_EQ(*mesh.get_coordinate(), (std::vector<int64_t>{rank / 4, rank / 2 % 2, rank % 2}));
    EXPECT_EQ(mesh.get_local_rank("cp"), rank / 2 % 2);
    EXPECT_EQ(mesh.get_group({"tp"}).ranks(), (RankList{rank / 2 * 2, rank / 2 * 2 + 1}));
    EXPECT_EQ(mesh.get_group({"dp"}).rank(), rank / 4);
    EXPECT_EQ(mesh.get_group().size(), 8);
    EXPECT_EQ(mesh.get_group({"cp", "dp"}).to_string(),
              rank % 2 ? "cp-dp [1, 3, 5, 7]" : "cp-dp [0, 2, 4, 6]");

    at::Tensor sum = at::full({1}, rank, at::kLong);
    all_reduce(mesh.get_group({"dp", "tp"}), sum, ReduceOp::sum, "test").wait();
    EXPECT_EQ(sum.item<int64_t>(), rank / 2 % 2 ? 2 + 3 + 6 + 7 : 0 + 1 + 4 + 5);
  });
}

TEST(DeviceMesh, G22GroupsOfMegatronsHyperCommGrid) {
  run_ranks(8, [](const ParallelState& state) {
    const int64_t rank = state.rank();
    const DeviceMesh mesh(state, {2, 2, 2}, {"dp", "cp", "tp"});
    const RankList pairs[] = {{0, 1}, {2, 3}, {4, 5}, {6, 7}};
    const RankList quads[] = {{0, 1, 2, 3}, {4, 5, 6, 7}};
    const RankList strided[] = {{0, 4}, {1, 5}, {2, 6}, {3, 7}};
    EXPECT_EQ(mesh.get_group({"tp"}).ranks(), pairs[rank / 2]);
    EXPECT_EQ(mesh.get_group({"tp", "cp"}).ranks(), quads[rank / 4]);
    EXPECT_EQ(mesh.get_group({"dp"}).ranks(), strided[rank % 4]);
    const DeviceMesh half(state, {2, 2}, {"cp", "tp"}, 4);
    EXPECT_EQ(half.get_coordinate().has_value(), rank >= 4);
    if (rank < 4) return;
    EXPECT_EQ(half.get_group({"tp"}).ranks(), pairs[rank / 2]);
  });
}

TEST(DeviceMesh, ACombinationOfAxesIsConnectedOnce) {
  run_ranks(8, [](const ParallelState& state) {
    const DeviceMesh mesh(state, {2, 2, 2}, {"dp", "cp", "tp"});
    auto* first = mesh.get_group({"dp", "cp"}).c10d_group();
    ASSERT_NE(first, nullptr);
    EXPECT_EQ(mesh.get_group({"cp", "dp"}).c10d_group(), first);
    EXPECT_EQ(mesh.slice({"dp", "cp"}).get_group().c10d_group(), first);
    const DeviceMesh flat = mesh.slice({"dp", "cp"}).flatten();
    EXPECT_EQ(flat.get_group({"dp_cp"}).c10d_group(), first);
    EXPECT_EQ(mesh["dp_cp"].get_group().c10d_group(), first);
  });
}

TEST(DeviceMesh, FlattenedAxesAreRemembered) {
  run_ranks(8, [](const ParallelState& state) {
    const DeviceMesh mesh(state, {2, 2, 2}, {"dp", "cp", "tp"});
    EXPECT_TRUE(throws_with<UsageError>([&] { (void)mesh["dp_cp"]; },
                                        "found axis 'dp_cp', allowed: dp, cp, tp"));
    const DeviceMesh flat = mesh.slice({"dp", "cp"}).flatten();
    EXPECT_EQ(flat.to_string(), "dp_cp=4");
    EXPECT_EQ(flat.get_local_rank("dp_cp"), state.rank() / 2);
    EXPECT_TRUE(mesh["dp_cp"] == flat);
    EXPECT_TRUE(mesh.slice({"dp", "cp"}).flatten() == flat);
    EXPECT_TRUE(flat.flatten() == flat);
    const DeviceMesh both = mesh.slice({"tp", "dp_cp"});
    EXPECT_EQ(both.to_string(), "tp=2 x dp_cp=4");
    EXPECT_EQ(both.layout().ranks(), (RankList{0, 2, 4, 6, 1, 3, 5, 7}));
    EXPECT_TRUE(throws_with<UsageError>(
        [&] {
          (void)mesh.slice({"cp", "dp"}).flatten("dp_cp");
        },
        "'dp_cp', which joins other axes already"));
    EXPECT_TRUE(throws_with<UsageError>(
        [&] {
          (void)mesh.slice({"cp", "dp"}).flatten("tp");
        },
        "'tp', which is an axis already"));
  });
}

TEST(DeviceMesh, TheGridsOfAParallelState) {
  run_ranks(8,
            [](const ParallelState& state) {
              const DeviceMesh dense = DeviceMesh::dense(state);
              EXPECT_EQ(dense.to_string(), "pp=2 x dp=2 x cp=1 x tp=2");
              EXPECT_EQ(dense.get_group({to_string(MeshAxis::dp), "cp"}).ranks(),
                        state.group(GroupKind::dp_cp).ranks());
              EXPECT_EQ(dense.get_group({"dp", "cp"}).c10d_group(),
                        state.group(GroupKind::dp_cp).c10d_group());
              EXPECT_EQ(dense.get_local_rank("pp"), state.group(GroupKind::pp).rank());
              EXPECT_EQ(dense.get_group({"cp"}).c10d_group(), nullptr);
              const DeviceMesh expert = DeviceMesh::expert(state);
              EXPECT_EQ(expert.to_string(), "pp=2 x edp=1 x ep=4 x etp=1");
              EXPECT_EQ(expert.get_group({"ep"}).ranks(), state.group(GroupKind::ep).ranks());
            },
            {.sizes = {.tensor = 2, .pipeline = 2, .expert = 4, .expert_tensor = 1}});
}

TEST(DeviceMesh, ARankMayHoldAMeshThatItIsNotIn) {
  run_ranks(4, [](const ParallelState& state) {
    const DeviceMesh mesh(state, {2}, {"dp"}, 2);
    EXPECT_EQ(mesh.layout().ranks(), (RankList{2, 3}));
    if (state.rank() >= 2) {
      EXPECT_EQ(mesh.get_local_rank("dp"), state.rank() - 2);
      EXPECT_EQ(mesh.get_group().size(), 2);
      return;
    }
    EXPECT_EQ(mesh.get_coordinate(), std::nullopt);
    const std::string message =
        "rank " + std::to_string(state.rank()) + " is not in the mesh dp=2 of 2 ranks";
    EXPECT_TRUE(throws_with<UsageError>([&] { (void)mesh.get_local_rank("dp"); }, message));
    EXPECT_TRUE(throws_with<UsageError>([&] { (void)mesh.get_group(); }, message));
    EXPECT_TRUE(throws_with<UsageError>([&] { (void)mesh["dp"]; }, message));
  });
}

TEST(DeviceMesh, RanksOutsideTheWorldAreNamed) {
  const ParallelState state = ParallelState::single_process();
  EXPECT_EQ(DeviceMesh(state, {1, 1}, {"a", "b"}).get_group().size(), 1);
  EXPECT_TRUE(throws_with<ConfigError>(
      [&] {
        DeviceMesh(state, {2, 2}, {"a", "b"});
      },
      "mesh a=2 x b=2: holds rank 3, which is outside the world of 1 ranks"));
  EXPECT_TRUE(throws_with<ConfigError>([&] { DeviceMesh(state, {1}, {"a"}, RankList{7}); },
                                       "mesh a=1: holds rank 7"));
  EXPECT_TRUE(throws_with<ConfigError>([&] { DeviceMesh(state, {1}, {"a"}, 5); }, "holds rank 5"));
}

}  // namespace
}  // namespace lockstep
