#include "lockstep/core/philox.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace lockstep {
namespace {

// Known answers of the authors' library Random123 (kat_vectors, philox4x32 10 rounds).
TEST(Philox, KnownAnswers) {
  using Words = std::array<uint32_t, 4>;
  constexpr uint32_t ones = 0xffffffff;
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}),
            (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox4x32({ones, ones, ones, ones}, {ones, ones}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(CounterStream, DependsOnSeedNameAndPosition) {
  const CounterStream stream(1, "weight");
  EXPECT_EQ(stream.bits(5), CounterStream(1, "weight").bits(5));
  EXPECT_NE(stream.bits(5), stream.bits(6));
  EXPECT_NE(stream.bits(5), CounterStream(2, "weight").bits(5));
  EXPECT_NE(stream.bits(5), CounterStream(1, "weigh").bits(5));
  EXPECT_NE(stream.bits(uint64_t{1} << 32), stream.bits(0));
}

TEST(CounterStream, NormalsHaveTheMomentsOfTheNormalDistribution) {
  const CounterStream stream(3, "x");
  constexpr int pairs = 100000;
  double sum = 0, squares = 0, fourth = 0, product = 0;
  for (int k = 0; k < pairs; ++k) {
    const auto [a, b] = stream.normal_pair(k);
    sum += a + b;
    squares += a * a + b * b;
    fourth += a * a * a * a + b * b * b * b;
    product += a * b;
  }
  // Five standard errors each: 1, sqrt(2), sqrt(96) over sqrt(2 pairs), and 1 over sqrt(pairs).
  EXPECT_NEAR(sum / (2 * pairs), 0, 5 / std::sqrt(2.0 * pairs));
  EXPECT_NEAR(squares / (2 * pairs), 1, 5 * std::sqrt(2 / (2.0 * pairs)));
  EXPECT_NEAR(fourth / (2 * pairs), 3, 5 * std::sqrt(96 / (2.0 * pairs)));
  EXPECT_NEAR(product / pairs, 0, 5 / std::sqrt(double{pairs}));
}

TEST(Permutation, IsABijectionOfEverySize) {
  for (uint64_t size : {1, 2, 3, 4, 5, 16, 17, 100, 1000, 4097}) {
    const Permutation permutation(size, 7, "order");
    std::vector<bool> hit(size, false);
    for (uint64_t i = 0; i < size; ++i) {
      const uint64_t image = permutation(i);
      ASSERT_LT(image, size);
      ASSERT_FALSE(hit[image]) << "size " << size << ", twice " << image;
      hit[image] = true;
    }
  }
}

TEST(Permutation, ShufflesAndDependsOnTheSeed) {
  const Permutation a(1000, 1, "order"), b(1000, 2, "order");
  int fixed = 0, equal = 0;
  for (uint64_t i = 0; i < 1000; ++i) {
    fixed += a(i) == i;
    equal += a(i) == b(i);
  }
  EXPECT_LT(fixed, 10);
  EXPECT_LT(equal, 10);
}

}  // namespace
}  // namespace lockstep
