#include "lockstep/parallel_state/ordered_reduction.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

namespace lockstep {
namespace {

constexpr int64_t kNumel = 3000;  // more than one block, not a multiple of a vector

template <class T>
std::vector<std::vector<T>> make_terms(int64_t count) {
  std::vector<std::vector<T>> terms(static_cast<size_t>(count), std::vector<T>(kNumel));
  for (int64_t t = 0; t < count; ++t)
    for (int64_t i = 0; i < kNumel; ++i)
      terms[t][i] = static_cast<T>(100 * std::sin(0.1 * static_cast<double>(i) + 1.7 * t));
  return terms;
}

template <class T>
std::vector<T> reduce(HostType type, const HostReduction& reduction,
                      const std::vector<std::vector<T>>& terms) {
  std::vector<const void*> pointers;
  for (const auto& term : terms) pointers.push_back(term.data());
  std::vector<T> out(kNumel);
  reduce_in_order(type, reduction, out.data(), pointers.data(),
                  static_cast<int64_t>(pointers.size()), kNumel);
  return out;
}

template <class T>
void expect_left_to_right(HostType type, const HostReduction& reduction) {
  for (const int64_t count : {1, 2, 3, 7}) {
    const auto terms = make_terms<T>(count);
    const auto out = reduce(type, reduction, terms);
    for (int64_t i = 0; i < kNumel; ++i) {
      // volatile: every intermediate is rounded to T.
      volatile T sum = 0;
      for (int64_t t = 0; t < count; ++t) {
        volatile T term = terms[t][i];
        term = term * static_cast<T>(reduction.multiplier);
        term = term / static_cast<T>(reduction.divisor);
        sum = t == 0 ? term : static_cast<T>(sum + term);
      }
      sum = sum / static_cast<T>(reduction.result_divisor);
      ASSERT_EQ(out[i], sum) << count << " terms, element " << i;
    }
  }
}

TEST(OrderedReduction, AddsFromLeftToRightBitForBit) {
  for (const HostReduction& reduction :
       {HostReduction{}, HostReduction{.divisor = 3}, HostReduction{.multiplier = 7, .divisor = 11},
        HostReduction{.result_divisor = 3}}) {
    expect_left_to_right<float>(HostType::f32, reduction);
    expect_left_to_right<double>(HostType::f64, reduction);
  }
  expect_left_to_right<int32_t>(HostType::i32, {});
  expect_left_to_right<int64_t>(HostType::i64, {});
}

template <class T>
void expect_wrapping(HostType type) {
  for (const int64_t count : {2, 3}) {
    std::vector<std::vector<T>> terms(static_cast<size_t>(count), std::vector<T>(kNumel, 0));
    terms[0].assign(kNumel, std::numeric_limits<T>::max());
    terms[1].assign(kNumel, 1);
    EXPECT_EQ(reduce(type, {}, terms)[kNumel - 1], std::numeric_limits<T>::min());
    EXPECT_EQ(reduce(type, {.multiplier = 2}, terms)[kNumel - 1], 0);
  }
}

/// The undefined-behavior sanitizer sees it if they do not.
TEST(OrderedReduction, IntegersWrapAsInLibtorch) {
  expect_wrapping<int8_t>(HostType::i8);
  expect_wrapping<int16_t>(HostType::i16);
  expect_wrapping<int32_t>(HostType::i32);
  expect_wrapping<int64_t>(HostType::i64);
}

TEST(OrderedReduction, LargestAndSmallest) {
  const auto terms = make_terms<float>(3);
  const auto largest = reduce(HostType::f32, {.op = HostReduceOp::max}, terms);
  const auto smallest = reduce(HostType::f32, {.op = HostReduceOp::min}, terms);
  for (int64_t i = 0; i < kNumel; ++i) {
    EXPECT_EQ(largest[i], std::max({terms[0][i], terms[1][i], terms[2][i]}));
    EXPECT_EQ(smallest[i], std::min({terms[0][i], terms[1][i], terms[2][i]}));
  }
}

TEST(OrderedReduction, ANanOfAnyRankStays) {
  for (const HostReduceOp op : {HostReduceOp::sum, HostReduceOp::max, HostReduceOp::min})
    for (const size_t rank : {0, 1, 2}) {
      auto terms = make_terms<float>(3);
      terms[rank][5] = std::numeric_limits<float>::quiet_NaN();
      EXPECT_TRUE(std::isnan(reduce(HostType::f32, {.op = op}, terms)[5])) << rank;
    }
}

TEST(OrderedReduction, TheResultMayBeOneOfTheTerms) {
  for (const int64_t count : {2, 3})
    for (int64_t own = 0; own < count; ++own) {
      auto terms = make_terms<double>(count);
      const auto expected = reduce(HostType::f64, {.divisor = 5}, terms);
      std::vector<const void*> pointers;
      for (const auto& term : terms) pointers.push_back(term.data());
      reduce_in_order(HostType::f64, {.divisor = 5}, terms[own].data(), pointers.data(), count,
                      kNumel);
      EXPECT_EQ(terms[own], expected);
    }
}

float widen(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

TEST(OrderedReduction, Bf16IsAddedInFp32AndRoundedOnceToNearestEven) {
  // 256 + 1 + 1 + 1 in bf16 stays 256 if every sum is rounded. In fp32 it is 259, halfway between
  // 258 and 260.
  const uint16_t one = 0x3F80, large = 0x4380;
  std::vector<std::vector<uint16_t>> terms(4, std::vector<uint16_t>(kNumel, one));
  terms[0].assign(kNumel, large);
  const auto out = reduce(HostType::bf16, {}, terms);
  EXPECT_EQ(widen(out[0]), 260);  // the tie goes to the even mantissa
  EXPECT_EQ(out[kNumel - 1], out[0]);
  terms[1].assign(kNumel, 0x7FC0);
  EXPECT_TRUE(std::isnan(widen(reduce(HostType::bf16, {}, terms)[0])));
}

TEST(OrderedReduction, HalfIsAddedInFp32) {
  std::vector<std::vector<_Float16>> terms(3, std::vector<_Float16>(kNumel, _Float16(1)));
  terms[0].assign(kNumel, _Float16(2048));
  EXPECT_EQ(static_cast<float>(reduce(HostType::f16, {}, terms)[kNumel - 1]), 2050);
}

}  // namespace
}  // namespace lockstep
