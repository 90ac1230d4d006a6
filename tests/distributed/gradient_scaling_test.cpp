#include "lockstep/distributed/gradient_scaling.h"

#include <gtest/gtest.h>

#include "lockstep/core/error.h"

namespace lockstep {
namespace {

using enum GradientScalingMode;

struct Row {
  GradientScalingMode mode;
  int64_t dp_cp, edp;
  ScalingFactor dense, expert;
};

// G66 and G67. Megatron's exact float comparison refuses the sizes of G67.
const Row kTable[] = {
    {per_token, 8, 2, {1, 1}, {1, 1}},
    {average, 8, 2, {1, 8}, {1, 8}},
    {average_in_collective, 8, 2, {1, 1}, {1, 4}},
    {average, 1, 1, {1, 1}, {1, 1}},
    {average_in_collective, 1, 1, {1, 1}, {1, 1}},
    {average_in_collective, 33, 11, {1, 1}, {1, 3}},
    {average_in_collective, 70, 14, {1, 1}, {1, 5}},
    {average_in_collective, 78, 6, {1, 1}, {1, 13}},
    {average_in_collective, 90, 10, {1, 1}, {1, 9}},
    {average_in_collective, 4, 8, {1, 1}, {2, 1}},
    {average, 6, 3, {1, 6}, {1, 6}},
};

TEST(GradientScaling, Table) {
  for (const Row& row : kTable) {
    const GradientScaling scaling = gradient_scaling(row.mode, row.dp_cp, row.edp);
    EXPECT_EQ(scaling.dense, row.dense) << to_string(row.mode) << " " << row.dp_cp;
    EXPECT_EQ(scaling.expert, row.expert) << to_string(row.mode) << " " << row.dp_cp;
  }
}

TEST(GradientScaling, TheNetFactorIsTheSameForDenseAndExpert) {
  for (int64_t dp_cp = 1; dp_cp <= 100; ++dp_cp) {
    for (int64_t edp = 1; edp <= dp_cp; ++edp) {
      const GradientScaling s = gradient_scaling(average_in_collective, dp_cp, edp);
      // expert factor / edp == 1 / dp_cp, in integers
      EXPECT_EQ(s.expert.numerator * dp_cp, s.expert.denominator * edp);
    }
  }
}

TEST(GradientScaling, NonsenseIsRefused) {
  EXPECT_THROW(gradient_scaling(average, 0, 1), ConfigError);
  EXPECT_THROW(gradient_scaling(average, 1, 0), ConfigError);
}

}  // namespace
}  // namespace lockstep
