#include "lockstep/training/rank_comparison.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

/// Times in the order of StepPart.
StepTimes parts(double forward, double backward, double communication, double optimizer,
                double data, double other) {
  return {.ms = {forward, backward, communication, optimizer, data, other}};
}

TEST(RankComparison, TheSlowestRankIsTheOneForWhichTheOthersWait) {
  // All take 100 ms; rank 2 waits least.
  const SlowestRank slowest = slowest_rank({parts(20, 40, 34, 5, 0, 1), parts(21, 39, 34, 5, 0, 1),
                                            parts(20, 65, 9, 5, 0, 1), parts(20, 40, 34, 5, 0, 1)});
  EXPECT_EQ(slowest.rank, 2);
  EXPECT_EQ(slowest.ms, 91);
  EXPECT_EQ(slowest.part, StepPart::backward);
  EXPECT_EQ(slowest.behind_ms, 25);  // the lower median of 39, 40, 40 and 65 is 40
  EXPECT_EQ(slowest.times[StepPart::communication], 9);
}

TEST(RankComparison, EveryPartButCommunicationCanBeTheCause) {
  for (size_t i = 0; i < kStepParts; ++i) {
    const auto part = static_cast<StepPart>(i);
    std::vector<StepTimes> ranks(3, parts(10, 20, 50, 5, 1, 2));
    ranks[1][part] += 30;
    const SlowestRank slowest = slowest_rank(ranks);
    if (part == StepPart::communication) {
      EXPECT_EQ(slowest.rank, 0);
      EXPECT_EQ(slowest.behind_ms, 0);
      EXPECT_NE(slowest.part, StepPart::communication);
    } else {
      EXPECT_EQ(slowest.rank, 1) << name_of(part);
      EXPECT_EQ(slowest.part, part);
      EXPECT_EQ(slowest.behind_ms, 30);
    }
  }
}

TEST(RankComparison, OneRankIsItsOwnMedian) {
  const SlowestRank slowest = slowest_rank({parts(1, 2, 3, 4, 5, 6)});
  EXPECT_EQ(slowest.rank, 0);
  EXPECT_EQ(slowest.ms, 18);
  EXPECT_EQ(slowest.behind_ms, 0);
}

TEST(RankComparison, MeansOfSeveralIterationsTravelInASum) {
  constexpr int64_t kRanks = 3;
  std::vector<double> sum(static_cast<size_t>(RankTimes::payload_size(kRanks)), 0);
  EXPECT_EQ(sum.size(), 18u);
  std::vector<RankTimes> ranks(kRanks);
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    RankTimes& own = ranks[static_cast<size_t>(rank)];
    EXPECT_TRUE(own.empty());
    for (const int64_t iteration : {11, 12, 13, 14})
      own.add(iteration, parts(10, rank == 1 ? static_cast<double>(iteration) : 8, 0, 1, 0, 0));
    std::vector<double> payload(sum.size(), -1);  // previous values do not matter
    own.take(payload, rank);
    EXPECT_TRUE(own.empty());
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += payload[i];
  }
  for (const RankTimes& own : ranks) {
    const SlowestRank slowest = own.compare(sum);
    EXPECT_EQ(slowest.rank, 1);
    EXPECT_EQ(slowest.ms, 10 + 12.5 + 1);
    EXPECT_EQ(slowest.part, StepPart::backward);
    EXPECT_EQ(slowest.behind_ms, 4.5);
    EXPECT_EQ(slowest.first_iteration, 11);
    EXPECT_EQ(slowest.last_iteration, 14);
  }
}

TEST(RankComparison, TimesThatAreAddedBeforeTheSumHasComeBackCountForTheNext) {
  RankTimes times;
  times.add(1, parts(1, 0, 0, 0, 0, 0));
  std::vector<double> payload(kStepParts);
  times.take(payload, 0);
  times.add(2, parts(5, 0, 0, 0, 0, 0));
  const SlowestRank first = times.compare(payload);
  EXPECT_EQ(first.ms, 1);
  EXPECT_EQ(first.last_iteration, 1);
  times.take(payload, 0);
  EXPECT_EQ(times.compare(payload).ms, 5);
  EXPECT_EQ(times.compare(payload).first_iteration, 2);
}

}  // namespace
}  // namespace lockstep
