#include "lockstep/kernels/sum_of_squares.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "lockstep/core/error.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep::kernels {
namespace {

TEST(SumOfSquares, EqualsTheSumInDouble) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16})
    for (const int64_t n : {0, 1, 15, 16, 17, 16384, 100003}) {
      const at::Tensor x = at::sin(at::arange(n, at::kDouble)).to(dtype);
      const double expected = x.to(at::kDouble).square().sum().item<double>();
      EXPECT_NEAR(sum_of_squares(x).item<double>(), expected, 1e-12 * (1 + expected))
          << n << " elements of " << at::toString(dtype);
    }
}

TEST(SumOfSquares, SmallTermsAreNotLostBesideLargeOnes) {
  // In fp32 each 1 would vanish next to 1e8.
  at::Tensor x = at::ones({100001}, at::kFloat);
  x[0] = 1e4;
  EXPECT_EQ(sum_of_squares(x).item<double>(), 1e8 + 1e5);
}

TEST(SumOfSquares, ThreadsDoNotChangeTheBits) {
  const at::Tensor x = at::sin(at::arange(500000, at::kDouble)).to(at::kFloat);
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const double one = sum_of_squares(x).item<double>();
  at::set_num_threads(3);
  const double three = sum_of_squares(x).item<double>();
  at::set_num_threads(threads);
  EXPECT_EQ(one, three);
}

TEST(SumOfSquares, RefusesOtherTensors) {
  EXPECT_TRUE(testing::throws_with<UsageError>([] { sum_of_squares(at::ones({4}, at::kInt)); },
                                               "found Int"));
  EXPECT_TRUE(testing::throws_with<UsageError>(
      [] {
        sum_of_squares(at::ones({4, 4}).t()[0]);
      },
      "found Float that is not contiguous, allowed: contiguous"));
}

}  // namespace
}  // namespace lockstep::kernels
