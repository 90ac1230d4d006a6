#include "lockstep/benchmarks/interleaved.h"

#include <gtest/gtest.h>

namespace lockstep::benchmarks {
namespace {

TEST(Interleaved, AMedianIsTheMiddleValueOrTheMeanOfTheMiddleTwo) {
  EXPECT_EQ(median({7}), 7);
  EXPECT_EQ(median({9, 1, 4}), 4);
  EXPECT_EQ(median({8, 1}), 4.5);
  EXPECT_EQ(median({9, 2, 100, 5}), 7);
  EXPECT_EQ(median({3, 3, 1, 3, 9, 0}), 3);
}

TEST(Interleaved, AnEstimateIsOfTheMediansOfAllRoundsAndOfEachBlock) {
  const auto ratio = [](const std::vector<double>& medians) { return medians[0] / medians[1]; };
  const Estimate found = estimate({{2, 4, 6, 20}, {1, 1, 1, 1}}, 2, ratio);
  EXPECT_EQ(found.value, 5);
  EXPECT_EQ(found.low, 3);
  EXPECT_EQ(found.high, 13);
}

}  // namespace
}  // namespace lockstep::benchmarks
