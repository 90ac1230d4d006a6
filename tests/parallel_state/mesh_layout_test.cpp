#include "lockstep/parallel_state/mesh_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "lockstep/core/error.h"

namespace lockstep {
namespace {

using Groups = std::vector<RankList>;
using Names = std::vector<std::string>;

Names split(const std::string& text) {
  Names names;
  std::istringstream stream(text);
  for (std::string name; std::getline(stream, name, ',');) names.push_back(name);
  return names;
}

/// Compares with PyTorch's DeviceMesh; see scripts/golden/dtensor.py.
TEST(MeshLayout, EqualsPyTorchsDeviceMesh) {
  std::ifstream file(LOCKSTEP_SOURCE_DIR "/tests/parallel_state/device_mesh_golden.json");
  int slices = 0;
  for (const auto& golden : nlohmann::json::parse(file)) {
    const std::vector<int64_t> shape = golden["shape"];
    const Names names = golden["names"];
    const RankList ranks = golden["ranks"];
    const MeshLayout listed(shape, names, ranks);
    EXPECT_EQ(listed.ranks(), ranks);
    std::vector<MeshLayout> meshes = {listed};
    if (std::is_sorted(ranks.begin(), ranks.end())) meshes.emplace_back(shape, names, ranks[0]);
    for (const MeshLayout& mesh : meshes) {
      for (const auto& view : golden["views"]) {
        const int64_t rank = view["rank"];
        ASSERT_EQ(mesh.contains(rank), !view["coordinate"].is_null());
        if (!mesh.contains(rank)) continue;
        EXPECT_EQ(*mesh.coordinate(rank), view["coordinate"].get<std::vector<int64_t>>());
        for (const auto& [key, expected] : view["slices"].items()) {
          const Names axes = split(key);
          const MeshLayout slice = mesh.slice(axes, rank);
          EXPECT_EQ(slice.names(), axes);
          EXPECT_EQ(slice.ranks(), expected.get<RankList>()) << mesh.to_string() << " " << key;
          const MeshLayout flat = slice.flatten("flat");
          EXPECT_EQ(flat.shape(), std::vector<int64_t>{slice.size()});
          EXPECT_EQ(flat.ranks(), slice.ranks());
          const auto place = std::find(expected.begin(), expected.end(), rank) - expected.begin();
          EXPECT_EQ(*flat.coordinate(rank), std::vector<int64_t>{place});
          ++slices;
        }
      }
    }
  }
  EXPECT_GT(slices, 500);
}

TEST(MeshLayout, G22IsMegatronsHyperCommGridWithTheAxesTurnedRound) {
  const MeshLayout mesh({2, 2, 2}, {"dp", "cp", "tp"});
  EXPECT_EQ(mesh.groups({"tp"}), (Groups{{0, 1}, {2, 3}, {4, 5}, {6, 7}}));
  EXPECT_EQ(mesh.groups({"tp", "cp"}), (Groups{{0, 1, 2, 3}, {4, 5, 6, 7}}));
  EXPECT_EQ(mesh.groups({"dp"}), (Groups{{0, 4}, {1, 5}, {2, 6}, {3, 7}}));
  EXPECT_EQ(MeshLayout({2, 2}, {"cp", "tp"}, 4).groups({"tp"}), (Groups{{4, 5}, {6, 7}}));
}

TEST(MeshLayout, OneCombinationOfAxesIsOneGroupInWhicheverOrderTheyAreNamed) {
  const MeshLayout mesh({2, 2, 2}, {"dp", "cp", "tp"});
  EXPECT_EQ(mesh.group({"dp", "tp"}, 3), (RankList{2, 3, 6, 7}));
  EXPECT_EQ(mesh.group({"tp", "dp"}, 3), (RankList{2, 3, 6, 7}));
  EXPECT_EQ(mesh.slice({"tp", "dp"}, 3).ranks(), (RankList{2, 6, 3, 7}));
  EXPECT_EQ(mesh.slice({"tp", "dp"}, 3).group({"dp", "tp"}, 3), (RankList{2, 6, 3, 7}));
  EXPECT_EQ(mesh.groups({"dp", "tp"}), (Groups{{0, 1, 4, 5}, {2, 3, 6, 7}}));
}

TEST(MeshLayout, AFlattenedAxisStandsBesideTheOthers) {
  const MeshLayout mesh({2, 3, 2}, {"dp", "cp", "tp"});
  const MeshLayout dp_tp = mesh.slice({"dp", "tp"}, 5).flatten("dp_tp");
  EXPECT_EQ(dp_tp.ranks(), (RankList{4, 5, 10, 11}));
  const MeshLayout both = mesh.slice({"cp", "dp_tp"}, 5, dp_tp.axes());
  EXPECT_EQ(both.to_string(), "cp=3 x dp_tp=4");
  EXPECT_EQ(both.ranks(), (RankList{0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11}));
  EXPECT_EQ(*both.coordinate(8), (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(both.group({"dp_tp"}, 8), (RankList{2, 3, 8, 9}));
  EXPECT_EQ(both.groups({"cp"}), (Groups{{0, 2, 4}, {1, 3, 5}, {6, 8, 10}, {7, 9, 11}}));
}

TEST(MeshLayout, AMillionRanksCostNothingUntilTheyAreListed) {
  const int64_t million = 1 << 20;
  const MeshLayout mesh({million, million, 8}, {"pp", "dp", "tp"});
  const int64_t rank = 12345 * million * 8 + 77 * 8 + 5;
  EXPECT_EQ(*mesh.coordinate(rank), (std::vector<int64_t>{12345, 77, 5}));
  EXPECT_EQ(mesh.group({"tp"}, rank).front(), rank - 5);
  EXPECT_EQ(mesh.slice({"pp", "tp"}, rank).size(), million * 8);
}

/// Expects that the groups of `mesh` along `axes` are those of `kind`.
void expect_kind(const RankGrids& grids, const MeshLayout& mesh, GroupKind kind,
                 const Names& axes) {
  Groups expected;
  for (int64_t i = 0; i < grids.count(kind); ++i) expected.push_back(grids.group(kind, i));
  EXPECT_EQ(mesh.groups(axes), expected) << to_string(kind) << " of " << mesh.to_string();
}

TEST(MeshLayout, GroupsOfTheGridsAreThoseOfMegatron) {
  using enum GroupKind;
  const ParallelSizes sizes[] = {
      {.world_size = 16, .tensor = 2, .pipeline = 2, .context = 2},
      {.world_size = 16, .tensor = 2, .pipeline = 2, .expert = 2, .expert_tensor = 1},
      {.world_size = 24, .tensor = 2, .pipeline = 3, .context = 2, .order = "cp-dp-tp-pp"},
      {.world_size = 16, .pipeline = 2, .expert = 4, .order = "ep-tp-dp-pp"},
      {.world_size = 12, .tensor = 3, .order = "tp-pp-dp"}};
  for (const ParallelSizes& size : sizes) {
    const RankGrids grids(size);
    const MeshLayout dense = dense_mesh_layout(grids), expert = expert_mesh_layout(grids);
    EXPECT_EQ(dense.size(), size.world_size);
    EXPECT_EQ(expert.size(), size.world_size);
    expect_kind(grids, dense, tp, {"tp"});
    expect_kind(grids, dense, cp, {"cp"});
    expect_kind(grids, dense, dp, {"dp"});
    expect_kind(grids, dense, pp, {"pp"});
    expect_kind(grids, dense, dp_cp, {"dp", "cp"});
    expect_kind(grids, dense, tp_pp, {"tp", "pp"});
    expect_kind(grids, dense, tp_dp_cp, {"tp", "dp", "cp"});
    expect_kind(grids, expert, ep, {"ep"});
    expect_kind(grids, expert, expert_tp, {"etp"});
    expect_kind(grids, expert, expert_dp, {"edp"});
    expect_kind(grids, expert, tp_ep, {"etp", "ep"});
    expect_kind(grids, expert, tp_ep_pp, {"etp", "ep", "pp"});
  }
  const RankGrids grids({.world_size = 8, .tensor = 2, .expert = 2});
  EXPECT_EQ(dense_mesh_layout(grids).to_string(), "pp=1 x dp=4 x cp=1 x tp=2");
  EXPECT_EQ(expert_mesh_layout(grids).to_string(), "pp=1 x edp=2 x ep=2 x etp=2");
}

template <class ErrorType>
std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const ErrorType& error) {
    return error.what();
  }
  return "";
}

TEST(MeshLayout, MeshesThatCannotBeAreNamed) {
  const auto of = [](const std::vector<int64_t>& shape, const Names& names, auto last) {
    return refusal<ConfigError>([&] { MeshLayout(shape, names, last); });
  };
  EXPECT_EQ(of({2, 4}, {"dp", "dp"}, 0), "mesh dp=2 x dp=4: axis 'dp' is named twice");
  EXPECT_EQ(of({2, 4}, {"dp"}, 0),
            "mesh: found 2 sizes and 1 names of axes, allowed: one name for each size");
  EXPECT_EQ(of({}, {}, 0),
            "mesh: found 0 sizes and 0 names of axes, allowed: one name for each size");
  EXPECT_EQ(of({2, 0}, {"dp", "tp"}, 0), "mesh dp=2 x tp=0: axis 'tp' has size 0, allowed: >= 1");
  EXPECT_EQ(of({2, 2}, {"dp", ""}, 0), "mesh dp=2 x =2: axis 1 has no name");
  EXPECT_EQ(of({2}, {"dp"}, -1),
            "mesh dp=2: rank offset -1, allowed: >= 0, with all ranks in 64 bits");
  EXPECT_EQ(of({int64_t{1} << 40, int64_t{1} << 40}, {"a", "b"}, 0),
            "mesh a=1099511627776 x b=1099511627776: its ranks do not fit into 64 bits");
  EXPECT_EQ(of({2, 2}, {"dp", "tp"}, RankList{0, 1, 2}),
            "mesh dp=2 x tp=2: 3 ranks are listed, allowed: 4");
  EXPECT_EQ(of({2}, {"dp"}, RankList{3, 3}), "mesh dp=2: rank 3 is listed twice");
  EXPECT_EQ(of({2}, {"dp"}, RankList{3, -1}), "mesh dp=2: rank -1 is listed, allowed: >= 0");
}

TEST(MeshLayout, QuestionsThatCannotBeAnsweredAreNamed) {
  const MeshLayout mesh({2, 2, 2}, {"dp", "cp", "tp"});
  const auto slice = [&](const Names& axes, int64_t rank) {
    return refusal<UsageError>([&] { (void)mesh.slice(axes, rank); });
  };
  EXPECT_EQ(slice({"ep"}, 0), "mesh dp=2 x cp=2 x tp=2: found axis 'ep', allowed: dp, cp, tp");
  EXPECT_EQ(slice({"tp", "tp"}, 0), "mesh dp=2 x cp=2 x tp=2: axis 'tp' is named twice");
  EXPECT_EQ(slice({}, 0), "mesh dp=2 x cp=2 x tp=2: a slice needs at least one axis");
  EXPECT_EQ(slice({"tp"}, 8), "rank 8 is not in the mesh dp=2 x cp=2 x tp=2 of 8 ranks");
  EXPECT_EQ(refusal<UsageError>([&] {
              (void)mesh.group({"tp", "x"}, 0);
            }),
            "mesh dp=2 x cp=2 x tp=2: found axis 'x', allowed: dp, cp, tp");
  EXPECT_EQ(refusal<UsageError>([&] {
              (void)mesh.group({"tp", "tp"}, 0);
            }),
            "mesh dp=2 x cp=2 x tp=2: axis 'tp' is named twice");
  const auto joined = mesh.slice({"dp", "cp"}, 0).flatten("dp_cp").axes();
  EXPECT_EQ(refusal<UsageError>([&] {
              (void)mesh.slice({"dp_cp", "cp"}, 0, joined);
            }),
            "mesh dp=2 x cp=2 x tp=2: axis 'cp' shares ranks with dp_cp=4");
  EXPECT_EQ(refusal<UsageError>([&] {
              (void)mesh.slice({"tp", "cp"}, 0).slice({"dp_cp"}, 0, joined);
            }),
            "mesh tp=2 x cp=2: found axis 'dp_cp', allowed: tp, cp");
  EXPECT_EQ(mesh.coordinate(-1), std::nullopt);
  EXPECT_EQ(mesh.slice({"tp"}, 3).coordinate(4), std::nullopt);
}

}  // namespace
}  // namespace lockstep
