#include "lockstep/parallel_state/pipeline_position.h"

#include <gtest/gtest.h>

#include "lockstep/core/error.h"

namespace lockstep {
namespace {

TEST(PipelinePosition, G21) {
  const RankGrids grids({.world_size = 8, .tensor = 2, .pipeline = 4});
  for (int64_t rank = 0; rank < 8; ++rank) {
    const PipelinePosition at(grids, rank);
    EXPECT_EQ(at.next_rank(), (rank + 2) % 8);
    EXPECT_EQ(at.previous_rank(), (rank + 6) % 8);
    EXPECT_EQ(at.first_rank(), rank % 2);
    EXPECT_EQ(at.last_rank(), 6 + rank % 2);
    EXPECT_EQ(grids.group_of(GroupKind::dp, rank), RankList{rank});
    EXPECT_EQ(at.stage(), rank / 2);
    EXPECT_EQ(at.rank_of(1), 2 + rank % 2);
    EXPECT_EQ(at.is_first_stage(), rank < 2);
    EXPECT_EQ(at.is_last_stage(), rank >= 6);
  }
}

TEST(PipelinePosition, VirtualStages) {
  const RankGrids grids({.world_size = 2, .pipeline = 2, .virtual_pipeline = 3});
  const PipelinePosition first(grids, 0), last(grids, 1);
  EXPECT_TRUE(first.is_first_stage(0));
  EXPECT_FALSE(first.is_first_stage(1));
  EXPECT_FALSE(first.is_last_stage(2));
  EXPECT_FALSE(last.is_last_stage(0));
  EXPECT_TRUE(last.is_last_stage(2));
  EXPECT_TRUE(first.in_embedding_group(0));
  EXPECT_FALSE(first.in_embedding_group(2));
  EXPECT_TRUE(last.in_embedding_group(2));
  EXPECT_FALSE(last.in_embedding_group(0));
  EXPECT_TRUE(last.in_embedding_group());
  EXPECT_THROW(last.is_last_stage(3), UsageError);
}

TEST(PipelinePosition, OneStageIsFirstAndLast) {
  const RankGrids grids({.world_size = 3});
  const PipelinePosition at(grids, 1);
  EXPECT_TRUE(at.is_first_stage(0) && at.is_last_stage(0) && at.in_embedding_group(0));
  EXPECT_EQ(at.next_rank(), 1);
  EXPECT_EQ(at.previous_rank(), 1);
  EXPECT_THROW(at.is_first_stage(1), UsageError);
  EXPECT_THROW(at.rank_of(1), UsageError);
  EXPECT_THROW(PipelinePosition(grids, 3), UsageError);
}

}  // namespace
}  // namespace lockstep
