// Equality with the groups of Megatron Core 0.16.1; see scripts/golden/rank_groups.py.

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "lockstep/parallel_state/pipeline_position.h"

namespace lockstep {
namespace {

using GoldenJson = nlohmann::json;

const GoldenJson& golden_cases() {
  static const GoldenJson cases = [] {
    std::ifstream file(LOCKSTEP_SOURCE_DIR "/tests/parallel_state/rank_groups_golden.json");
    return GoldenJson::parse(file).at("cases");
  }();
  return cases;
}

std::optional<int64_t> optional_size(const GoldenJson& value) {
  return value.is_null() ? std::nullopt : std::optional(value.get<int64_t>());
}

ParallelSizes sizes_of(const GoldenJson& json) {
  return {.world_size = json["world_size"],
          .tensor = json["tensor"],
          .pipeline = json["pipeline"],
          .virtual_pipeline = optional_size(json["virtual_pipeline"]),
          .context = json["context"],
          .expert = json["expert"],
          .expert_tensor = optional_size(json["expert_tensor"]),
          .order = json["order"],
          .optimizer_instances = json["optimizer_instances"],
          .hierarchical_context = json["hierarchical_context"]};
}

GoldenJson listed(const RankGroups& groups) {
  GoldenJson lists = GoldenJson::array();
  for (int64_t index = 0; index < groups.count(); ++index) lists.push_back(groups.group(index));
  return lists;
}

std::string fnv1a(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(hash));
  return digits;
}

void expect_groups(const GoldenJson& golden, const RankGroups& groups, const std::string& what) {
  const GoldenJson lists = listed(groups);
  EXPECT_EQ(golden, golden.is_string() ? GoldenJson(fnv1a(lists.dump())) : lists) << what;
}

TEST(RankGroupsGolden, EveryGroupIsMegatrons) {
  size_t compared = 0;
  for (const GoldenJson& golden : golden_cases()) {
    const RankGrids grids(sizes_of(golden["sizes"]));
    const GoldenJson& groups = golden["groups"];
    for (const GroupKind kind : all_group_kinds())
      expect_groups(groups[to_string(kind)], grids.groups(kind),
                    golden["sizes"].dump() + to_string(kind));
    const size_t levels = grids.sizes().hierarchical_context.size();
    for (size_t level = 0; level < levels; ++level)
      expect_groups(groups["cp-level-" + std::to_string(level)], grids.context_level(level),
                    golden["sizes"].dump() + " level " + std::to_string(level));
    EXPECT_EQ(groups.size(), all_group_kinds().size() + levels);
    compared += groups.size();
  }
  EXPECT_EQ(golden_cases().size(), 120u);
  EXPECT_GT(compared, 2400u);
}

TEST(RankGroupsGolden, PipelineGettersAreMegatrons) {
  int64_t compared = 0;
  for (const GoldenJson& golden : golden_cases()) {
    if (!golden.contains("pipeline")) continue;
    const RankGrids grids(sizes_of(golden["sizes"]));
    for (int64_t rank = 0; rank < grids.sizes().world_size; ++rank, ++compared) {
      const PipelinePosition at(grids, rank);
      GoldenJson chunks = GoldenJson::array();
      for (int64_t chunk = 0; chunk < at.chunks().value_or(1); ++chunk)
        chunks.push_back(
            {at.is_first_stage(chunk), at.is_last_stage(chunk), at.in_embedding_group(chunk)});
      const GoldenJson ours = {at.stage(),
                               at.previous_rank(),
                               at.next_rank(),
                               at.first_rank(),
                               at.last_rank(),
                               at.in_position_embedding_group(),
                               at.in_embedding_group(),
                               chunks};
      EXPECT_EQ(ours, golden["pipeline"][static_cast<size_t>(rank)])
          << golden["sizes"].dump() << " rank " << rank;
    }
  }
  EXPECT_GT(compared, 100);
}

}  // namespace
}  // namespace lockstep
