// Equality with the buffers of Megatron Core 0.16.1; see scripts/golden/param_layout.py.

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "lockstep/distributed/shard_ranges.h"

namespace lockstep {
namespace {

using Json = nlohmann::json;

const Json& golden_cases() {
  static const Json cases = [] {
    std::ifstream file(LOCKSTEP_SOURCE_DIR "/tests/distributed/param_layout_golden.json");
    return Json::parse(file).at("cases");
  }();
  return cases;
}

ParamLayout layout_of(const Json& golden) {
  std::vector<LayoutParam> params;
  for (const Json& numel : golden["numels"]) params.push_back({.numel = numel});
  for (const size_t index : golden["shared"]) params[index].shared_embedding = true;
  LayoutOptions options = {.distributed_optimizer = golden["distributed_optimizer"],
                           .data_parallel_size = golden["data_parallel"],
                           .pad_for_high_bus_bandwidth = golden["high_bandwidth"]};
  if (!golden["bucket_size"].is_null()) options.bucket_size = golden["bucket_size"];
  return compute_param_layout(params, options);
}

TEST(ParamLayoutGolden, OffsetsAndBucketsAreMegatrons) {
  EXPECT_GE(golden_cases().size(), 100u);
  for (const Json& golden : golden_cases()) {
    const ParamLayout layout = layout_of(golden);
    Json slots = Json::array(), buckets = Json::array();
    for (const auto& slot : layout.slots) slots.push_back({slot.start, slot.end, slot.bucket});
    for (const auto& bucket : layout.buckets)
      buckets.push_back({bucket.start, bucket.end, bucket.numel_unpadded, bucket.params});
    EXPECT_EQ(slots, golden["slots"]) << golden;
    EXPECT_EQ(buckets, golden["buckets"]) << golden;
    EXPECT_EQ(layout.numel, golden["numel"]) << golden;
    EXPECT_EQ(layout.numel_unpadded, golden["numel_unpadded"]) << golden;
  }
}

TEST(ParamLayoutGolden, ShardsAreMegatrons) {
  size_t compared = 0;
  for (const Json& golden : golden_cases()) {
    if (!golden.contains("ranges")) continue;
    const ParamLayout layout = layout_of(golden);
    Json ranges = Json::array();
    for (const int64_t rank : golden["ranks"])
      for (const ParamShard& shard : shards_of_rank(layout, golden["data_parallel"], rank)) {
        for (const ElementRange& range : {shard.in_bucket, shard.in_shard, shard.in_param})
          EXPECT_EQ(range.numel(), shard.in_buffer.numel());
        ranges.push_back({shard.bucket, shard.rank, shard.param, shard.in_buffer.numel(),
                          shard.in_buffer.start, shard.in_bucket.start, shard.in_shard.start,
                          shard.in_param.start});
      }
    EXPECT_EQ(ranges, golden["ranges"]) << golden;
    compared += ranges.size();
  }
  EXPECT_GT(compared, 500u);
}

}  // namespace
}  // namespace lockstep
