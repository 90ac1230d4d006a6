#include "lockstep/kernels/fingerprint.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/kernels/fingerprint_body.h"
#include "lockstep/kernels/fingerprint_loop.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

/// The header's definition, word by word. The first word of `bytes` has number `first`.
uint64_t expected(const std::vector<unsigned char>& bytes, uint64_t first = 0) {
  std::vector<unsigned char> filled = bytes;
  filled.resize((bytes.size() + 3) / 4 * 4, 0);
  uint64_t sum = 0;
  for (size_t i = 0; i < filled.size() / 4; ++i) {
    uint64_t word = 0;
    for (size_t b = 0; b < 4; ++b) word |= uint64_t{filled[4 * i + b]} << (8 * b);
    sum += word * ((2 * (first + i) + 1) & 0xffffffff);
  }
  return sum;
}

at::Tensor tensor_of(const std::vector<unsigned char>& bytes) {
  const at::Tensor tensor = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  if (!bytes.empty()) std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  return tensor;
}

std::vector<unsigned char> random_bytes(size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<unsigned char> bytes(count);
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
  return bytes;
}

int64_t number(const at::Tensor& fingerprint) { return fingerprint.item<int64_t>(); }

TEST(Fingerprint, IsTheSumOfItsHeader) {
  // Lengths near those of a word, a vector, a thread's block and many blocks.
  for (const size_t count :
       {0, 1, 3, 4, 5, 31, 64, 67, 65535, 65536, 65537, 3 * 65536 + 6, 40 * 65536 + 2}) {
    const auto bytes = random_bytes(count, static_cast<unsigned>(count));
    const at::Tensor tensor = tensor_of(bytes);
    const auto wanted = static_cast<int64_t>(expected(bytes));
    EXPECT_EQ(number(kernels::fingerprint(tensor)), wanted) << count;
    EXPECT_EQ(number(kernels::fingerprint_by_operators(tensor)), wanted) << count;
  }
}

TEST(Fingerprint, TheMultipliersBeginAgainAfterTwoToThe31Words) {
  constexpr int64_t kPeriod = int64_t{1} << 31;
  for (const size_t count : {67, 1000, 4000}) {
    const auto bytes = random_bytes(count, static_cast<unsigned>(count));
    for (const int64_t period : {1, 2, 5})
      for (const int64_t before : {0, 1, 15, 16, 17, 200, 250, 900}) {
        const int64_t first = period * kPeriod - before;
        EXPECT_EQ(kernels::fingerprint_loop(bytes.data(), static_cast<int64_t>(count), first),
                  expected(bytes, static_cast<uint64_t>(first)))
            << count << " " << first;
      }
  }
}

TEST(Fingerprint, TheLanesOfADeviceAddUpToIt) {
  const std::vector<unsigned char> bytes = random_bytes(70016, 11);
  alignas(16) static unsigned char memory[70016];
  std::memcpy(memory, bytes.data(), bytes.size());
  for (const size_t first : {0, 1, 4, 16})
    for (const size_t count : {0, 1, 3, 15, 16, 17, 4097, 70000})
      for (const int64_t lanes : {1, 7, 256, 512}) {
        uint64_t sum = 0;
        for (int64_t lane = 0; lane < lanes; ++lane)
          sum +=
              kernels::fingerprint_lane(memory + first, static_cast<int64_t>(count), lane, lanes);
        const auto begin = bytes.begin() + static_cast<int64_t>(first);
        EXPECT_EQ(sum, expected({begin, begin + static_cast<int64_t>(count)}))
            << first << " " << count << " " << lanes;
      }
}

TEST(Fingerprint, OperatorsTakeMoreThanOnePiece) {
  const at::Tensor tensor = tensor_of(random_bytes((1 << 24) + 7, 3));
  EXPECT_EQ(number(kernels::fingerprint_by_operators(tensor)),
            number(kernels::fingerprint(tensor)));
}

TEST(Fingerprint, EachFlippedBitChangesIt) {
  auto bytes = random_bytes(70, 5);
  const int64_t before = number(kernels::fingerprint(tensor_of(bytes)));
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] ^= static_cast<unsigned char>(1 << bit % 8);
    EXPECT_NE(number(kernels::fingerprint(tensor_of(bytes))), before) << bit;
    bytes[bit / 8] ^= static_cast<unsigned char>(1 << bit % 8);
  }
}

TEST(Fingerprint, SwappedWordsChangeIt) {
  const at::Tensor tensor = at::arange(100, at::kFloat);
  const int64_t before = number(kernels::fingerprint(tensor));
  for (int64_t i = 1; i < 100; ++i) {
    at::Tensor swapped = tensor.clone();
    swapped[0] = tensor[i];
    swapped[i] = tensor[0];
    EXPECT_NE(number(kernels::fingerprint(swapped)), before) << i;
  }
}

TEST(Fingerprint, TellsNegativeZeroAndNotANumberApart) {
  const auto of = [](float value) { return number(kernels::fingerprint(at::full({3}, value))); };
  EXPECT_NE(of(0.0F), of(-0.0F));
  EXPECT_EQ(of(NAN), of(NAN));
}

TEST(Fingerprint, TakesSlicesThatBeginInTheMiddleOfAWord) {
  const at::Tensor all = at::arange(41, at::kBFloat16);
  const at::Tensor odd = all.narrow(0, 1, 39);
  EXPECT_EQ(number(kernels::fingerprint(odd)), number(kernels::fingerprint(odd.clone())));
  EXPECT_EQ(number(kernels::fingerprint_by_operators(odd)),
            number(kernels::fingerprint(odd.clone())));
  EXPECT_NE(number(kernels::fingerprint(odd)), number(kernels::fingerprint(all.narrow(0, 0, 39))));
}

TEST(Fingerprint, DoesNotDependOnTheShape) {
  const at::Tensor tensor = at::arange(24, at::kDouble);
  EXPECT_EQ(number(kernels::fingerprint(tensor.view({2, 3, 4}))),
            number(kernels::fingerprint(tensor)));
}

TEST(Fingerprint, RefusesWhatIsNotContiguous) {
  EXPECT_TRUE(testing::throws_with<UsageError>(
      [] { kernels::fingerprint(at::arange(10).slice(0, 0, 10, 2)); }, "not contiguous"));
}

}  // namespace
}  // namespace lockstep
