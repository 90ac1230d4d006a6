#pragma once

// Internal.

#include <algorithm>
#include <cstdint>

#include "lockstep/core/integers.h"

/// How transfers and reductions on the host are cut into messages and reads. All results count
/// bytes.
namespace lockstep {

/// Threads of a communicator that run collectives.
constexpr int64_t kHostWorkers = 2;

/// Number of chunks of a slice whose receives are posted at the same time.
constexpr int64_t kHostChunksAhead = 3;

/// Size of a chunk among `size` > 1 ranks, for elements of `item` bytes: as large as fits the
/// cache.
constexpr int64_t host_chunk_bytes(int64_t size, int64_t item) {
  constexpr int64_t kScratch = 1 << 24, kSmallest = 1 << 16, kLargest = 1 << 20;
  return std::clamp(kScratch / (kHostChunksAhead * (size - 1)), kSmallest, kLargest) / item * item;
}

/// Size of a chunk that is read from the memory of the other ranks: it is added while it is in the
/// core's own cache.
constexpr int64_t direct_chunk_bytes(int64_t item) {
  constexpr int64_t kChunk = 1 << 16;
  return kChunk / item * item;
}

/// Size of the memory where chunks arrive that are read, for the slice of `numel` elements that a
/// rank adds.
constexpr int64_t direct_scratch_bytes(int64_t numel, int64_t size, int64_t item) {
  return size == 1 ? 0 : size * std::min(numel * item, direct_chunk_bytes(item));
}

/// Size of the memory where the other ranks' chunks arrive as messages, for such a slice.
constexpr int64_t host_scratch_bytes(int64_t numel, int64_t size, int64_t item) {
  if (size == 1) return 0;
  const int64_t chunk = host_chunk_bytes(size, item);
  return std::min(ceil_div(numel * item, chunk), kHostChunksAhead) * (size - 1) * chunk;
}

}  // namespace lockstep
