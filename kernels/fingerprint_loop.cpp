#include "lockstep/kernels/fingerprint_loop.h"

#include <algorithm>
#include <cstring>

#include "lockstep/core/vector_clones.h"

namespace lockstep::kernels {
namespace {

/// Pairs of words: the first of each pair is the low half.
using Lanes = uint64_t __attribute__((vector_size(64)));
constexpr int64_t kLanes = sizeof(Lanes) / sizeof(uint64_t);
constexpr int64_t kWord = sizeof(uint32_t);
constexpr int64_t kRow = sizeof(Lanes) / kWord;  ///< words
constexpr int64_t kAhead = 4096;                 ///< bytes; no hardware prefetch crosses pages
constexpr int64_t kPeriod = int64_t{1} << 31;    ///< words until the multipliers repeat

uint64_t term(const unsigned char* memory, int64_t bytes, uint32_t multiplier) {
  uint32_t word = 0;
  std::memcpy(&word, memory, static_cast<size_t>(bytes));
  return uint64_t{word} * multiplier;
}

uint32_t multiplier_of(int64_t word) { return static_cast<uint32_t>(word) * 2 + 1; }

/// The sum over `rows` rows within a period; `start` is the first word's multiplier. The loop needs
/// no multiplications: adding up, in each row, a column's sum so far counts row r (rows - r) times.
LOCKSTEP_VECTOR_CLONES
uint64_t rows_loop(const unsigned char* memory, int64_t rows, uint32_t start) {
  Lanes both{}, high{}, sums_of_both{}, sums_of_high{};
  for (int64_t row = 0; row < rows; ++row) {
    const unsigned char* const at = memory + row * static_cast<int64_t>(sizeof(Lanes));
    __builtin_prefetch(at + kAhead);
    Lanes words;
    std::memcpy(&words, at, sizeof(words));
    both += words;
    high += words >> 32;
    sums_of_both += both;
    sums_of_high += high;
  }
  const Lanes low = both - (high << 32), sums_of_low = sums_of_both - (sums_of_high << 32);
  const auto all = static_cast<uint64_t>(rows);
  const auto of_column = [&](uint64_t words, uint64_t sums, int64_t column) {
    return words * (start + 2 * static_cast<uint64_t>(column)) + 2 * kRow * (all * words - sums);
  };
  uint64_t sum = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane)
    sum += of_column(low[lane], sums_of_low[lane], 2 * lane) +
           of_column(high[lane], sums_of_high[lane], 2 * lane + 1);
  return sum;
}

/// The sum over words within a period, from word `first` on.
uint64_t words_loop(const unsigned char* memory, int64_t words, int64_t first) {
  const int64_t rows = words / kRow;
  uint64_t sum = rows_loop(memory, rows, multiplier_of(first));
  for (int64_t i = rows * kRow; i < words; ++i)
    sum += term(memory + i * kWord, kWord, multiplier_of(first + i));
  return sum;
}

}  // namespace

uint64_t fingerprint_loop(const unsigned char* memory, int64_t bytes, int64_t first) {
  const int64_t words = bytes / kWord;
  uint64_t sum = 0;
  for (int64_t done = 0; done < words;) {
    const int64_t left = kPeriod - (first + done) % kPeriod;
    const int64_t count = std::min(left, words - done);
    sum += words_loop(memory + done * kWord, count, first + done);
    done += count;
  }
  if (const int64_t rest = bytes % kWord; rest > 0)
    sum += term(memory + words * kWord, rest, multiplier_of(first + words));
  return sum;
}

}  // namespace lockstep::kernels
