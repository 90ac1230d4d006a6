#include "lockstep/parallel_state/shard_layout.h"

#include <gtest/gtest.h>

#include "lockstep/core/error.h"

namespace lockstep {
namespace {

using Placements = std::vector<Placement>;
using Sizes = std::vector<int64_t>;

const Placement kWhole = Replicate{}, kRows = Shard{0}, kColumns = Shard{1}, kTerms = Partial{};

TEST(ShardLayout, ChunksAreThoseOfTorchChunk) {
  const auto sizes = [](int64_t length, int64_t count) {
    Sizes result;
    int64_t end = 0;
    for (int64_t i = 0; i < count; ++i) {
      const Chunk chunk = chunk_of(length, count, i);
      EXPECT_EQ(chunk.start, end);
      end += chunk.size;
      result.push_back(chunk.size);
    }
    EXPECT_EQ(end, length);
    return result;
  };
  EXPECT_EQ(sizes(8, 4), (Sizes{2, 2, 2, 2}));
  EXPECT_EQ(sizes(7, 4), (Sizes{2, 2, 2, 1}));
  EXPECT_EQ(sizes(5, 4), (Sizes{2, 2, 1, 0}));
  EXPECT_EQ(sizes(6, 4), (Sizes{2, 2, 2, 0}));
  EXPECT_EQ(sizes(1, 4), (Sizes{1, 0, 0, 0}));
  EXPECT_EQ(sizes(0, 2), (Sizes{0, 0}));
}

TEST(ShardLayout, TwoAxesCutADimensionFromLeftToRight) {
  const auto part = [](const Sizes& coordinate, size_t axes) {
    return local_part({7, 3}, {2, 2}, coordinate, {kRows, kRows}, axes);
  };
  EXPECT_EQ(part({0, 1}, 0).shape, (Sizes{7, 3}));
  EXPECT_EQ(part({0, 1}, 1).shape, (Sizes{4, 3}));
  EXPECT_EQ(part({0, 1}, 2).shape, (Sizes{2, 3}));
  EXPECT_EQ(part({0, 1}, 2).offset, (Sizes{2, 0}));
  EXPECT_EQ(part({1, 1}, 2).shape, (Sizes{1, 3}));
  EXPECT_EQ(part({1, 1}, 2).offset, (Sizes{6, 0}));
}

/// "axis 1: Shard(0) to Replicate; ..."
std::string plan(const Placements& from, const Placements& to) {
  std::string text;
  for (const RedistributeStep& step : plan_redistribution(from, to))
    text += (text.empty() ? "" : "; ") + std::to_string(step.axis) + ": " + to_string(step.from) +
            " to " + to_string(step.to);
  return text;
}

TEST(ShardLayout, PlansChangeOneAxisAtATimeFromTheLastToTheFirst) {
  EXPECT_EQ(plan({kRows, kColumns}, {kRows, kColumns}), "");
  EXPECT_EQ(plan({kRows}, {kColumns}), "0: Shard(0) to Shard(1)");
  EXPECT_EQ(plan({kRows, kRows}, {kWhole, kWhole}),
            "1: Shard(0) to Replicate; 0: Shard(0) to Replicate");
  EXPECT_EQ(plan({kRows, kTerms}, {kWhole, kWhole}),
            "1: Partial(sum) to Replicate; 0: Shard(0) to Replicate");
  EXPECT_EQ(plan({kRows, kRows}, {kRows, kColumns}), "1: Shard(0) to Shard(1)");
}

TEST(ShardLayout, WhatLiesInsideAnotherCutIsReplicatedOnTheWay) {
  EXPECT_EQ(plan({kRows, kRows}, {kWhole, kRows}),
            "1: Shard(0) to Replicate; 0: Shard(0) to Replicate; 1: Replicate to Shard(0)");
  EXPECT_EQ(plan({kRows, kColumns}, {kColumns, kRows}),
            "1: Shard(1) to Replicate; 0: Shard(0) to Shard(1); 1: Replicate to Shard(0)");
  EXPECT_EQ(plan({kRows, kTerms}, {kWhole, kRows}),
            "1: Partial(sum) to Replicate; 0: Shard(0) to Replicate; 1: Replicate to Shard(0)");
}

TEST(ShardLayout, TermsWaitWhereTheTensorOnlyGetsSmaller) {
  EXPECT_EQ(plan({kTerms, kTerms}, {kRows, kRows}),
            "0: Partial(sum) to Shard(0); 1: Partial(sum) to Shard(0)");
  EXPECT_EQ(plan({kWhole, kTerms}, {kRows, kRows}),
            "0: Replicate to Shard(0); 1: Partial(sum) to Shard(0)");
}

TEST(ShardLayout, PartialIsNoTarget) {
  EXPECT_EQ(plan({kTerms, kRows}, {kTerms, kWhole}), "1: Shard(0) to Replicate");
  try {
    plan({kWhole}, {kTerms});
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_STREQ(error.what(),
                 "placements (Replicate) cannot become (Partial(sum)): allowed targets of axis 0 "
                 "(Replicate) are Replicate and Shard");
  }
}

}  // namespace
}  // namespace lockstep
