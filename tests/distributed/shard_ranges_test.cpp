#include "lockstep/distributed/shard_ranges.h"

#include <gtest/gtest.h>

#include <random>

#include "lockstep/core/error.h"

namespace lockstep {
namespace {

ParamLayout sharded_layout(const std::vector<int64_t>& numels, int64_t data_parallel_size,
                           std::optional<int64_t> bucket_size = {}) {
  std::vector<LayoutParam> params;
  for (const int64_t numel : numels) params.push_back({.numel = numel});
  return compute_param_layout(params, {.bucket_size = bucket_size,
                                       .distributed_optimizer = true,
                                       .data_parallel_size = data_parallel_size});
}

std::vector<ParamShard> all_shards(const ParamLayout& layout, int64_t num_shards) {
  std::vector<ParamShard> shards;
  visit_shards(layout, num_shards, [&](const ParamShard& shard) { shards.push_back(shard); });
  return shards;
}

TEST(ShardRanges, G59) {
  const ParamLayout layout = sharded_layout({1000, 1000}, 4);
  const std::vector<ParamShard> expected = {
      {.rank = 0,
       .param = 1,
       .in_buffer = {0, 512},
       .in_bucket = {0, 512},
       .in_shard = {0, 512},
       .in_param = {0, 512}},
      {.rank = 1,
       .param = 1,
       .in_buffer = {512, 1000},
       .in_bucket = {512, 1000},
       .in_shard = {0, 488},
       .in_param = {512, 1000}},
      {.rank = 2,
       .param = 0,
       .in_buffer = {1024, 1536},
       .in_bucket = {1024, 1536},
       .in_shard = {0, 512},
       .in_param = {0, 512}},
      {.rank = 3,
       .param = 0,
       .in_buffer = {1536, 2024},
       .in_bucket = {1536, 2024},
       .in_shard = {0, 488},
       .in_param = {512, 1000}},
  };
  EXPECT_EQ(all_shards(layout, 4), expected);
  for (int64_t rank = 0; rank < 4; ++rank)
    EXPECT_EQ(shards_of_rank(layout, 4, rank), std::vector{expected[static_cast<size_t>(rank)]});
}

TEST(ShardRanges, G60) {
  const ParamLayout layout = sharded_layout({5000, 5000, 5000}, 2, 8000);
  EXPECT_EQ(shard_of_bucket(layout.buckets[1], 2, 1), (ElementRange{12672, 15232}));
  const auto last_of = [&](int64_t rank) { return shards_of_rank(layout, 2, rank).back(); };
  EXPECT_EQ(last_of(0), (ParamShard{.bucket = 1,
                                    .rank = 0,
                                    .param = 0,
                                    .in_buffer = {10112, 12672},
                                    .in_bucket = {0, 2560},
                                    .in_shard = {0, 2560},
                                    .in_param = {0, 2560}}));
  EXPECT_EQ(last_of(1), (ParamShard{.bucket = 1,
                                    .rank = 1,
                                    .param = 0,
                                    .in_buffer = {12672, 15112},
                                    .in_bucket = {2560, 5000},
                                    .in_shard = {0, 2440},
                                    .in_param = {2560, 5000}}));
}

TEST(ShardRanges, AParameterBehindAnotherInTheShard) {
  const auto shards = shards_of_rank(sharded_layout({10, 100}, 1), 1, 0);
  ASSERT_EQ(shards.size(), 2u);
  EXPECT_EQ(shards[0].param, 1);
  EXPECT_EQ(shards[1].in_shard, (ElementRange{128, 138}));
  EXPECT_EQ(shards[1].in_param, (ElementRange{0, 10}));
}

TEST(ShardRanges, NothingToOwn) {
  EXPECT_TRUE(shards_of_rank(sharded_layout({}, 3), 3, 2).empty());
  EXPECT_TRUE(shards_of_rank(sharded_layout({10}, 4), 4, 3).empty());
  EXPECT_TRUE(shards_of_rank(sharded_layout({0}, 2, 1), 2, 0).empty());
}

TEST(ShardRanges, MisuseIsRefused) {
  const ParamLayout layout = sharded_layout({1000}, 4);
  EXPECT_THROW(shards_of_rank(layout, 4, 4), UsageError);
  EXPECT_THROW(shards_of_rank(layout, 4, -1), UsageError);
  EXPECT_THROW(shards_of_rank(layout, 0, 0), UsageError);
  EXPECT_THROW(shards_of_rank(layout, 3, 0), UsageError);
  EXPECT_THROW(visit_shards(layout, 3, [](const ParamShard&) { FAIL(); }), UsageError);
  EXPECT_THROW(shard_of_bucket(layout.buckets[0], 4, 4), UsageError);
  EXPECT_THROW(shard_of_bucket(layout.buckets[0], 3, 0), UsageError);
}

/// Checks for all shards of `layout` that each element has exactly one owner.
void check_ownership(const std::vector<LayoutParam>& params, const ParamLayout& layout,
                     int64_t num_shards) {
  std::vector<std::vector<int64_t>> owner;
  for (const LayoutParam& param : params) owner.emplace_back(param.numel, -1);
  std::vector<std::vector<ParamShard>> by_rank(static_cast<size_t>(num_shards));
  ParamShard before = {.bucket = -1};
  visit_shards(layout, num_shards, [&](const ParamShard& shard) {
    ASSERT_LE(std::tie(before.bucket, before.rank), std::tie(shard.bucket, shard.rank));
    ASSERT_LE(before.in_buffer.end, shard.in_buffer.start);
    before = shard;
    by_rank[static_cast<size_t>(shard.rank)].push_back(shard);

    const auto& bucket = layout.buckets[static_cast<size_t>(shard.bucket)];
    const auto& slot = layout.slots[static_cast<size_t>(shard.param)];
    const ElementRange own = shard_of_bucket(bucket, num_shards, shard.rank);
    ASSERT_EQ(own.numel() * num_shards, bucket.end - bucket.start);
    ASSERT_GE(shard.in_buffer.start, own.start);
    ASSERT_LE(shard.in_buffer.end, own.end);
    ASSERT_GT(shard.in_buffer.numel(), 0);
    for (const auto& [range, origin] :
         {std::pair{shard.in_bucket, bucket.start}, std::pair{shard.in_shard, own.start},
          std::pair{shard.in_param, slot.start}}) {
      ASSERT_EQ(range.start + origin, shard.in_buffer.start);
      ASSERT_EQ(range.end + origin, shard.in_buffer.end);
    }
    for (int64_t i = shard.in_param.start; i < shard.in_param.end; ++i) {
      int64_t& element = owner[static_cast<size_t>(shard.param)].at(static_cast<size_t>(i));
      ASSERT_EQ(element, -1);
      element = shard.rank;
    }
  });
  for (const auto& elements : owner)
    for (const int64_t rank : elements) ASSERT_NE(rank, -1);
  for (int64_t rank = 0; rank < num_shards; ++rank)
    ASSERT_EQ(by_rank[static_cast<size_t>(rank)], shards_of_rank(layout, num_shards, rank));
}

TEST(ShardRanges, G61EveryElementOfRandomLayoutsHasOneOwner) {
  std::mt19937 random(7);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % n); };
  for (int trial = 0; trial < 1000; ++trial) {
    std::vector<LayoutParam> params(1 + below(12));
    for (LayoutParam& param : params)
      param = {.numel = below(10) == 0 ? below(2) : 1 + below(2000),
               .shared_embedding = below(6) == 0};
    LayoutOptions options = {.distributed_optimizer = true, .data_parallel_size = 1 + below(40)};
    if (below(2) == 1) options.bucket_size = 1 + below(5000);
    options.pad_for_high_bus_bandwidth = below(8) == 0;
    const ParamLayout layout = compute_param_layout(params, options);
    check_ownership(params, layout, options.data_parallel_size);
    if (HasFatalFailure()) FAIL() << "trial " << trial;
  }
}

}  // namespace
}  // namespace lockstep
