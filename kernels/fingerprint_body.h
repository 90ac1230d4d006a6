#pragma once

// Internal: the sum of fingerprint(), divided among lanes, which are CUDA's threads. No libtorch
// here, see adamw_loop.h.

#include <cstdint>

#include "lockstep/kernels/float_storage.h"

namespace lockstep::kernels {

struct alignas(16) WordQuad {
  uint32_t words[4];
};

/// The last word is padded with zeros.
LOCKSTEP_LANE uint32_t word_at(const unsigned char* memory, int64_t bytes, int64_t word) {
  uint32_t value = 0;
  for (int64_t i = 0; i < 4; ++i)
    if (const int64_t at = 4 * word + i; at < bytes) value |= uint32_t{memory[at]} << (8 * i);
  return value;
}

LOCKSTEP_LANE uint64_t fingerprint_term(uint32_t word, int64_t index) {
  return uint64_t{word} * (static_cast<uint32_t>(index) * 2 + 1);
}

/// The sum of the terms of lane `lane` of `lanes`: those of every lanes-th 16 bytes, and of every
/// lanes-th word after them. If `memory` is not a multiple of 16, it reads byte by byte.
LOCKSTEP_LANE uint64_t fingerprint_lane(const unsigned char* memory, int64_t bytes, int64_t lane,
                                        int64_t lanes) {
  const bool aligned = reinterpret_cast<uintptr_t>(memory) % sizeof(WordQuad) == 0;
  const int64_t quads = aligned ? bytes / static_cast<int64_t>(sizeof(WordQuad)) : 0;
  const auto* const packs = reinterpret_cast<const WordQuad*>(memory);
  uint64_t sum = 0;
  for (int64_t i = lane; i < quads; i += lanes) {
    const WordQuad quad = packs[i];
    for (int k = 0; k < 4; ++k) sum += fingerprint_term(quad.words[k], 4 * i + k);
  }
  for (int64_t i = 4 * quads + lane; i < (bytes + 3) / 4; i += lanes)
    sum += fingerprint_term(word_at(memory, bytes, i), i);
  return sum;
}

}  // namespace lockstep::kernels
