#include "lockstep/distributed/whole_param_layout.h"

#include <gtest/gtest.h>

#include <random>

#include "lockstep/core/error.h"
#include "lockstep/distributed/shard_ranges.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::throws_with;

LayoutOptions options_of(int64_t ranks, std::optional<int64_t> bucket_size = {}) {
  return {.bucket_size = bucket_size,
          .distributed_optimizer = true,
          .data_parallel_size = ranks,
          .whole_parameters = true};
}

ParamLayout layout_of(const std::vector<int64_t>& numels, const LayoutOptions& options) {
  std::vector<LayoutParam> params;
  for (const int64_t numel : numels) params.push_back({.numel = numel});
  return compute_param_layout(params, options);
}

std::vector<int64_t> ends_of(const ParamLayout& layout) {
  std::vector<int64_t> ends;
  for (const auto& bucket : layout.buckets) ends.push_back(bucket.end);
  return ends;
}

TEST(WholeParamLayout, G53DivisorOfShards) {
  const std::pair<int64_t, int64_t> expected[] = {{1, 128}, {2, 64},   {3, 128}, {4, 64},
                                                  {8, 64},  {128, 64}, {256, 64}};
  for (const auto& [ranks, divisor] : expected)
    EXPECT_EQ(whole_param_shard_divisor(ranks, false), divisor) << ranks;
  EXPECT_EQ(whole_param_shard_divisor(2, true), 32768);
  EXPECT_EQ(whole_param_shard_divisor(8, true), 8192);
}

TEST(WholeParamLayout, G54WhatFitsThePaddingIsTakenIn) {
  const ParamLayout layout = layout_of({256, 256, 256, 256, 256, 256}, options_of(4, 1280));
  EXPECT_EQ(ends_of(layout), (std::vector<int64_t>{2048}));
  EXPECT_EQ(layout.numel - layout.numel_unpadded, 512);
}

TEST(WholeParamLayout, G55BucketsOfEqualMatrices) {
  std::vector<LayoutParam> params(8, {.numel = 256, .rows = 16, .columns = 16});
  EXPECT_EQ(ends_of(compute_param_layout(params, options_of(2, 512))),
            (std::vector<int64_t>{512, 1024, 1536, 2048}));
}

TEST(WholeParamLayout, G56TakingInCanCost) {
  const ParamLayout layout = layout_of({192, 128, 128, 256, 192, 192}, options_of(2, 448));
  EXPECT_EQ(ends_of(layout), (std::vector<int64_t>{1024, 1408}));
  EXPECT_EQ(layout.buckets[0].numel_unpadded, 896);
  EXPECT_EQ(layout.buckets[1].numel_unpadded, 192);
}

TEST(WholeParamLayout, G57ALargeMatrixLeavesTheOtherRanksTheRest) {
  const ParamLayout layout = layout_of({1024, 128, 128, 128}, options_of(4));
  EXPECT_EQ(ends_of(layout), (std::vector<int64_t>{4096}));
  EXPECT_EQ(layout.slots[0].start, 0);
  EXPECT_EQ(layout.slots[3].start, 1024);
  EXPECT_EQ(layout.slots[2].start, 2048);
  EXPECT_EQ(layout.slots[1].start, 3072);
}

TEST(WholeParamLayout, G58ATiedEmbeddingLiesAloneInTheFirstShard) {
  const std::vector<LayoutParam> params = {
      {.numel = 256}, {.numel = 256}, {.numel = 512, .shared_embedding = true}};
  const ParamLayout layout = compute_param_layout(params, options_of(2));
  EXPECT_EQ(ends_of(layout), (std::vector<int64_t>{1024, 1536}));
  EXPECT_EQ(layout.slots[2].start, 0);
  EXPECT_EQ(layout.slots[2].end, 512);
}

/// Cost counts, not size: a square matrix costs more than a long one with as many elements.
TEST(WholeParamLayout, MatricesAreDealtOutByTheirWork) {
  const std::vector<LayoutParam> params = {{.numel = 1024, .rows = 1, .columns = 1024},
                                           {.numel = 1024, .rows = 32, .columns = 32},
                                           {.numel = 1024, .rows = 2, .columns = 512}};
  const ParamLayout layout = compute_param_layout(params, options_of(2));
  EXPECT_EQ(layout.slots[1].start, 0);  // 32768, alone on rank 0
  EXPECT_EQ(layout.slots[2].start, layout.buckets[0].end / 2);
}

TEST(WholeParamLayout, NoParameterIsCutAndEveryElementIsOwnedOnce) {
  std::mt19937_64 random(5);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % n); };
  for (int round = 0; round < 500; ++round) {
    const int64_t ranks = 1 + below(8);
    std::vector<LayoutParam> params;
    for (int64_t i = 1 + below(12); i > 0; --i) {
      const int64_t rows = 1 + below(40), columns = 1 + below(40);
      params.push_back({.numel = rows * columns,
                        .shared_embedding = below(10) == 0,
                        .rows = rows,
                        .columns = columns});
    }
    LayoutOptions options = options_of(ranks);
    if (below(3) > 0) options.bucket_size = 1 + below(5000);
    const ParamLayout layout = compute_param_layout(params, options);
    std::vector<int64_t> owned(params.size(), 0);
    visit_shards(layout, ranks, [&](const ParamShard& shard) {
      EXPECT_EQ(shard.in_param, (ElementRange{0, params[shard.param].numel}));
      EXPECT_EQ(shard.in_buffer.start % 64, 0);
      owned[static_cast<size_t>(shard.param)] += shard.in_param.numel();
    });
    for (size_t i = 0; i < params.size(); ++i) EXPECT_EQ(owned[i], params[i].numel);
    int64_t end = 0;
    for (const auto& bucket : layout.buckets) {
      EXPECT_EQ(bucket.start, end);
      EXPECT_EQ(bucket.end, pad_bucket_end(bucket.end, ranks, false));
      end = bucket.end;
      int64_t free_until = bucket.start;
      for (const int64_t index : bucket.params) {
        EXPECT_GE(layout.slots[static_cast<size_t>(index)].start, free_until);
        free_until = layout.slots[static_cast<size_t>(index)].end;
      }
    }
    EXPECT_EQ(end, layout.numel);
  }
}

}  // namespace
}  // namespace lockstep
