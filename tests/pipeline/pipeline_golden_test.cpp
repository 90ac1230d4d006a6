// Equality with what Megatron Core 0.16.1 runs; see scripts/golden/pipeline_schedules.py.

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "lockstep/core/error.h"
#include "lockstep/pipeline/schedule_check.h"
#include "lockstep/pipeline/stage_layout.h"

namespace lockstep {
namespace {

using Json = nlohmann::json;

const Json& golden(const char* part) {
  static const Json document = [] {
    std::ifstream file(LOCKSTEP_SOURCE_DIR "/tests/pipeline/pipeline_golden.json");
    return Json::parse(file);
  }();
  return document.at(part);
}

std::string fnv1a(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(hash));
  return digits;
}

TEST(PipelineGolden, EveryRankRunsItsTasksInMegatronsOrder) {
  size_t listed = 0;
  for (const Json& json : golden("schedules")) {
    const PipelineSchedule schedule = make_schedule({.pipeline = json["pipeline"],
                                                     .virtual_pipeline = json["virtual"],
                                                     .microbatches = json["microbatches"],
                                                     .microbatch_group_size = json["group"],
                                                     .forward_only = json["forward_only"]});
    check_schedule(schedule);
    EXPECT_EQ(json["warmup"], schedule.warmup) << json;
    for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
      std::string order;
      for (const PipelineTask& task : schedule.ranks[rank])
        order += (order.empty() ? "" : " ") + to_string(task);
      const std::string theirs = json["order"][rank];
      const bool is_listed = theirs[0] == 'F';
      listed += is_listed ? 1 : 0;
      EXPECT_EQ(theirs, is_listed ? order : fnv1a(order)) << json << " rank " << rank;
    }
    EXPECT_EQ(json["order"].size(), schedule.ranks.size());
  }
  EXPECT_EQ(golden("schedules").size(), 210u);
  EXPECT_GT(listed, 200u);
}

TEST(PipelineGolden, TheSameGroupSizesAreTaken) {
  for (const Json& json : golden("group_sizes")) {
    Json taken = Json::array();
    for (int64_t size = 1; size <= 25; ++size) {
      const ScheduleOptions options{.pipeline = json[0],
                                    .virtual_pipeline = 2,
                                    .microbatches = json[1],
                                    .microbatch_group_size = size};
      try {
        options.validate();
        taken.push_back(size);
      } catch (const ConfigError&) {
      }
    }
    EXPECT_EQ(taken, json[2]) << json;
  }
}

TEST(PipelineGolden, TextsOfLayouts) {
  for (const Json& json : golden("layouts")) {
    const StageLayout layout = parse_stage_layout(json["text"], json["pipeline"]);
    std::string text;
    for (size_t chunk = 0; chunk < json["virtual"]; ++chunk)
      for (const Json& rank : json["stages"])
        text += (text.empty() ? "" : "|") + rank[chunk].get<std::string>();
    EXPECT_EQ(layout.to_string(), text);
    EXPECT_EQ(layout.chunks(), json["virtual"]);
  }
}

/// Transformer layers over all stages; -1 if a stage has a negative number of them.
int64_t layers_of(const Json& stages) {
  int64_t sum = 0;
  for (const Json& rank : stages)
    for (const Json& chunk : rank) {
      if (chunk[1] < 0) return -1;
      sum += chunk[1].get<int64_t>();
    }
  return sum;
}

TEST(PipelineGolden, Splits) {
  const auto optional_size = [](const Json& value) {
    return value.is_null() ? std::nullopt : std::optional(value.get<int64_t>());
  };
  int64_t compared = 0, refused = 0;
  for (const Json& json : golden("splits")) {
    const LayerSplit split{.num_layers = json["layers"],
                           .pipeline = json["pipeline"],
                           .virtual_pipeline = json["virtual"],
                           .num_layers_in_first_pipeline_stage = optional_size(json["first"]),
                           .num_layers_in_last_pipeline_stage = optional_size(json["last"]),
                           .account_for_embedding_in_pipeline_split = json["embedding"],
                           .account_for_loss_in_pipeline_split = json["loss"]};
    // Megatron Core accepts some splits that lose layers.
    if (json["stages"].is_null() || layers_of(json["stages"]) != split.num_layers) {
      EXPECT_THROW(split_layers(split), ConfigError) << json;
      ++refused;
      continue;
    }
    const StageLayout layout = split_layers(split);
    layout.validate(split.num_layers);
    for (int64_t rank = 0; rank < split.pipeline; ++rank)
      for (int64_t chunk = 0; chunk < split.virtual_pipeline; ++chunk, ++compared) {
        const LayerRange layers = layout.layers(rank, chunk);
        const Json ours = {layers.begin, layers.size()};
        EXPECT_EQ(ours, json["stages"][static_cast<size_t>(rank)][static_cast<size_t>(chunk)])
            << json << " rank " << rank << " chunk " << chunk;
      }
  }
  EXPECT_GT(compared, 150);
  EXPECT_GT(refused, 50);
}

}  // namespace
}  // namespace lockstep
