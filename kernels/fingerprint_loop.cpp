#include "lockstep/kernels/fingerprint_loop.h"

#include <cstring>

#include "lockstep/core/vector_clones.h"

namespace lockstep::kernels {
namespace {

constexpr int64_t kWord = sizeof(uint32_t);

inline __attribute__((always_inline)) uint64_t term(const unsigned char* memory, int64_t bytes,
                                                    uint32_t multiplier) {
  uint32_t word = 0;
  std::memcpy(&word, memory, static_cast<size_t>(bytes));
  return uint64_t{word} * multiplier;
}

}  // namespace

LOCKSTEP_VECTOR_CLONES
uint64_t fingerprint_loop(const unsigned char* memory, int64_t bytes, int64_t first) {
  const int64_t words = bytes / kWord;
  const uint32_t start = static_cast<uint32_t>(first) * 2 + 1;
  uint64_t sum = 0;
  for (int64_t i = 0; i < words; ++i)
    sum += term(memory + i * kWord, kWord, start + static_cast<uint32_t>(i) * 2);
  if (const int64_t rest = bytes % kWord; rest > 0)
    sum += term(memory + words * kWord, rest, start + static_cast<uint32_t>(words) * 2);
  return sum;
}

}  // namespace lockstep::kernels
