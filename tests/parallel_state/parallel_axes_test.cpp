// The tables of axes: these tests find a table that lacks an axis, by the axis' name.

#include "lockstep/parallel_state/parallel_axes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "lockstep/checkpoint/manifest.h"
#include "lockstep/core/config_io.h"
#include "lockstep/core/error.h"
#include "lockstep/parallel_state/axis_groups.h"
#include "lockstep/parallel_state/group_listing.h"
#include "lockstep/parallel_state/mesh_layout.h"
#include "lockstep/planner/config_grids.h"

namespace lockstep {
namespace {

using Names = std::set<std::string>;
using Json = nlohmann::ordered_json;

constexpr std::array kGrids = {Grid::dense, Grid::expert};

ParamDescription of_grid(Grid grid) { return {.is_expert = grid == Grid::expert}; }

template <class Axes>
Names names_of(const Axes& axes) {
  Names names;
  for (const MeshAxis axis : axes) names.insert(to_string(axis));
  return names;
}

std::vector<MeshAxis> axes_of(Grid grid) {
  std::vector<MeshAxis> axes;
  for (const GridAxis& row : grid_axes(grid)) axes.push_back(row.axis);
  return axes;
}

/// A job in which only this size is 2, plus a second data-parallel rank. Chunks need stages.
ParallelSizes with_two(const ParallelSize& size) {
  ParallelSizes sizes = {.world_size = 4, .expert_tensor = 1};
  const std::string order = sizes.order;
  for (const OrderAxis& axis : order_axes())  // from the fastest to the slowest; pp comes last
    if (order.find(axis.name) == std::string::npos) sizes.order = axis.name + ("-" + sizes.order);
  if (std::string(size.name) == "virtual-pipeline") sizes.pipeline = 2;
  size.set(sizes, 2);
  return sizes;
}

Json listed_sizes(const RankGrids& grids) {
  std::ostringstream out;
  write_groups_json(out, grids, {.summary = true});
  return Json::parse(out.str())["sizes"];
}

TEST(ParallelAxes, EachAxisOfADescriptionIsInItsGrid) {
  for (const Grid grid : kGrids) EXPECT_EQ(names_of(axes_of(grid)), names_of(of_grid(grid).axes()));
}

TEST(ParallelAxes, OneAxisOfAGridHasTheRanksThatTheOthersLeave) {
  for (const Grid grid : kGrids)
    for (const GridAxis& row : grid_axes(grid))
      EXPECT_EQ(row.size == nullptr, row.in_order->name == std::string("dp"))
          << to_string(row.axis);
}

TEST(ParallelAxes, EachAxisHasANameInAnOrderAKindOfGroupsAndALineInTheListing) {
  const Json sizes = listed_sizes(RankGrids({}));
  std::set<GroupKind> kinds;
  for (const Grid grid : kGrids)
    for (const GridAxis& row : grid_axes(grid)) {
      const std::string name = to_string(row.axis);
      EXPECT_NO_THROW(RankGenerator({}, row.in_order->name)) << name;
      EXPECT_NO_THROW(kinds.insert(group_kind_of(row.axis))) << name;
      EXPECT_TRUE(sizes.contains(name)) << name;
    }
  EXPECT_EQ(kinds.size(), sizes.size());
}

TEST(ParallelAxes, EachAxisThatCutsParametersIsListedAsOne) {
  Names cutting;
  for (const Grid grid : kGrids)
    for (const MeshAxis axis : axes_of(grid))
      if (!splits_batch(axis) && axis != MeshAxis::pp) cutting.insert(to_string(axis));
  EXPECT_EQ(names_of(kCuttingAxes), cutting);
  for (const MeshAxis axis : axes_of(Grid::dense)) cutting.erase(to_string(axis));
  EXPECT_EQ(names_of(kAxesInsideReplicas), cutting);
}

/// A rank is identified by its position among the replicas and its position in the model.
TEST(ParallelAxes, AtSizeTwoReplicasTimesModelRanksAreTheWorld) {
  for (const ParallelSize* size : parallel_size_table()) {
    const RankGrids grids(with_two(*size));
    for (const Grid grid : kGrids) {
      const GroupKind same = replicas(of_grid(grid)), model = model_ranks(of_grid(grid));
      std::set<std::pair<RankList, RankList>> places;
      for (int64_t rank = 0; rank < 4; ++rank)
        places.emplace(grids.group_of(same, rank), grids.group_of(model, rank));
      EXPECT_EQ(places.size(), 4U) << size->name << ", " << to_string(same);
      EXPECT_EQ(grids.size(same) * grids.size(model), 4) << size->name << ", " << to_string(same);
    }
    EXPECT_EQ(grids.size(GroupKind::intra_optimizer), 4) << size->name;
    std::set<int64_t> reached = {0};
    for (const GroupKind kind : kinds_that_reach_all_ranks())
      for (const int64_t from : std::set<int64_t>(reached))
        for (const int64_t rank : grids.group_of(kind, from)) reached.insert(rank);
    EXPECT_EQ(reached.size(), 4U) << size->name;
  }
}

TEST(ParallelAxes, AtSizeTwoEachAxisHasGroupsAMeshAndAListingOfTwo) {
  for (const Grid grid : kGrids)
    for (const GridAxis& row : grid_axes(grid)) {
      if (!row.size) continue;
      const std::string name = to_string(row.axis);
      const RankGrids grids(with_two(*row.size));
      EXPECT_EQ(grids.count(group_kind_of(row.axis)), 2) << name;
      EXPECT_EQ(grids.size(group_kind_of(row.axis)), 2) << name;
      const MeshLayout mesh =
          grid == Grid::dense ? dense_mesh_layout(grids) : expert_mesh_layout(grids);
      EXPECT_EQ(mesh.size(name), 2);
      for (int64_t rank = 0; rank < 4; ++rank)
        EXPECT_EQ(mesh.group({name}, rank), grids.group_of(group_kind_of(row.axis), rank)) << name;
      EXPECT_EQ(listed_sizes(grids)[name], 2) << name;
    }
}

TEST(ParallelAxes, EachSizeOfTheConfigurationIsInTheTable) {
  std::set<std::string> fields = {"parallel.virtual_pipeline_model_parallel_size"};  // in chunks
  for (const ConfigField& field : config_fields())
    if (field.path.starts_with("parallel.") && field.unit == "ranks") fields.insert(field.path);
  std::set<std::string> found;
  for (const ParallelSize* size : parallel_size_table())
    found.insert(std::string("parallel.") + size->field);
  EXPECT_EQ(found, fields);
}

TEST(ParallelAxes, ARefusalNamesTheSizeThatIsSet) {
  const auto refusal = [](const std::vector<std::string>& more) -> std::string {
    const Config config = parse_config(
        "model { num_experts: 6 } parallel { expert_model_parallel_size: 3 "
        "tensor_model_parallel_size: 2 }",
        "text", more);
    try {
      config_grids(config.parallel, 4);
      return "";
    } catch (const ConfigError& error) {
      return error.what();
    }
  };
  EXPECT_TRUE(refusal({}).starts_with("parallel.tensor_model_parallel_size (2) x ")) << refusal({});
  EXPECT_EQ(refusal({}).find("expert_tensor"), std::string::npos) << refusal({});
  const std::string set = refusal({"parallel.expert_tensor_parallel_size=2"});
  EXPECT_TRUE(set.starts_with("parallel.expert_tensor_parallel_size (2) x ")) << set;
}

TEST(ParallelAxes, ASizeOfTheConfigurationBecomesTheSizeOfThatName) {
  for (const ParallelSize* size : parallel_size_table()) {
    const ParallelSizes expected = with_two(*size);
    const std::string path = std::string("parallel.") + size->field;
    const Config config = parse_config(
        "parallel { expert_tensor_parallel_size: 1 } model { num_experts: 4 }", "text",
        {path + "=2", "parallel.pipeline_model_parallel_size=" + std::to_string(expected.pipeline),
         "parallel.order=" + expected.order});
    const ParallelSizes sizes = parallel_sizes(config.parallel);
    for (const ParallelSize* other : parallel_size_table()) {
      EXPECT_EQ(other->of(sizes), other->of(expected)) << path << ", " << other->name;
      EXPECT_EQ(other->of(config.parallel), other->of(expected)) << path << ", " << other->name;
    }
    EXPECT_EQ(config_grids(config.parallel, 4).groups(GroupKind::dp).size(),
              RankGrids(expected).groups(GroupKind::dp).size())
        << path;
    EXPECT_EQ(fewest_ranks(config.parallel), 2) << path;
  }
}

TEST(ParallelAxes, EachSizeHasANameInTheManifestAndComesBack) {
  Manifest manifest;
  int64_t number = 2;
  for (const ParallelSize* size : parallel_size_table()) size->set(manifest.layout, ++number);
  const std::string text = format_manifest(manifest);
  EXPECT_EQ(parse_manifest(text, "m"), manifest);
  for (const ParallelSize* size : parallel_size_table()) {
    const std::string line =
        "  " + size->name_with('_') + ": " + std::to_string(size->of(manifest.layout)) + "\n";
    EXPECT_NE(text.find(line), std::string::npos) << line << text;
    Manifest other = manifest;
    size->set(other.layout, 99);
    EXPECT_NE(other, manifest) << size->name;
  }
}

/// The exact text that versions before the tables wrote.
TEST(ParallelAxes, TheManifestHasTheTextThatItAlwaysHad) {
  Manifest manifest;
  manifest.layout = {{.world_size = 8, .tensor = 2, .pipeline = 2, .expert = 2}, true};
  const std::string text = format_manifest(manifest);
  const auto begin = text.find("layout {");
  EXPECT_EQ(text.substr(begin, text.find("}", begin) + 1 - begin), R"(layout {
  world_size: 8
  tensor: 2
  pipeline: 2
  virtual_pipeline: 1
  context: 1
  expert: 2
  expert_tensor: 2
  order: "tp-cp-ep-dp-pp"
  distributed_optimizer: true
  optimizer_instances: 1
})");
  EXPECT_EQ(parse_manifest(text, "m"), manifest);
}

TEST(ParallelAxes, AnUnsetSizeIsOneOrThatOfAnother) {
  for (const ParallelSize* size : parallel_size_table()) {
    EXPECT_EQ(size->of(ParallelSizes()), 1) << size->name;
    EXPECT_EQ(
        size->of(ParallelSizes{.tensor = 3}),
        size->name == std::string("tensor") || size->name == std::string("expert-tensor") ? 3 : 1)
        << size->name;
  }
}

}  // namespace
}  // namespace lockstep
