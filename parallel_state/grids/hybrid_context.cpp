#include "lockstep/parallel_state/hybrid_context.h"

#include <bit>

#include "lockstep/core/check.h"
#include "lockstep/core/integers.h"

namespace lockstep {

std::vector<int64_t> hybrid_context_sizes(int64_t dp_cp) {
  require<ConfigError>(dp_cp >= 1,
                       "hybrid context: found {} data- and context-parallel ranks, "
                       "allowed: >= 1",
                       dp_cp);
  std::vector<int64_t> sizes;
  for (int64_t size = 2; size < dp_cp; size *= 2) sizes.push_back(size);
  return sizes;
}

int64_t hybrid_context_ranks(int64_t length, int64_t max_per_rank) {
  require<ConfigError>(length >= 1 && max_per_rank >= 1,
                       "hybrid context: found {} tokens and {} a rank, allowed: >= 1", length,
                       max_per_rank);
  const int64_t least = ceil_div(length, max_per_rank);
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(least)));
}

}  // namespace lockstep
