#include "lockstep/core/integers.h"

#include <gtest/gtest.h>

#include <limits>

namespace lockstep {
namespace {

TEST(Integers, RoundUpIsMegatronsPadToDivisor) {  // G25
  EXPECT_EQ(round_up(128, 64), 128);
  EXPECT_EQ(round_up(65, 64), 128);
  EXPECT_EQ(round_up(0, 64), 0);
}

TEST(Integers, CeilDiv) {
  EXPECT_EQ(ceil_div(0, 3), 0);
  EXPECT_EQ(ceil_div(9, 3), 3);
  EXPECT_EQ(ceil_div(10, 3), 4);
}

TEST(Integers, DivExactNamesBothNumbers) {
  EXPECT_EQ(div_exact(12, 4, "a", "b"), 3);
  try {
    div_exact(12, 5, "hidden_size", "heads");
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(), "hidden_size (12) must be divisible by heads (5)");
  }
  EXPECT_THROW(div_exact(12, 0, "a", "b"), ConfigError);
}

TEST(Integers, LargeValues) {
  constexpr int64_t kLargest = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(ceil_div(kLargest, 2), int64_t{1} << 62);
  EXPECT_EQ(round_up(kLargest, kLargest), kLargest);
}

TEST(Integers, CheckedArithmeticRefusesOverflow) {
  constexpr int64_t kLargest = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(checked_add(kLargest - 1, 1, "x"), kLargest);
  EXPECT_THROW(checked_add(kLargest, 1, "x"), UsageError);
  EXPECT_EQ(checked_mul(1 << 20, 1 << 20, "x"), int64_t{1} << 40);
  EXPECT_THROW(checked_mul(int64_t{1} << 40, int64_t{1} << 40, "x"), UsageError);
  EXPECT_EQ(checked_round_up(kLargest - 63, 64, "x"), kLargest - 63);
  EXPECT_THROW(checked_round_up(kLargest, 64, "x"), UsageError);
}

}  // namespace
}  // namespace lockstep
