#pragma once

#include <cstdint>
#include <vector>

/// Hybrid context parallelism: sequences of different lengths get different numbers of ranks out of
/// one dp-cp group. Pure arithmetic, with Megatron Core's numbers.
namespace lockstep {

/// Sizes of the sub-groups that a dp-cp group of `dp_cp` ranks is cut into, besides the whole
/// group: the powers of two from 2 to below `dp_cp`. ConfigError: dp_cp < 1.
std::vector<int64_t> hybrid_context_sizes(int64_t dp_cp);

/// Number of ranks for a sequence of `length` tokens of which each rank takes at most
/// `max_per_rank`: the smallest power of two that suffices. ConfigError: a number below 1.
int64_t hybrid_context_ranks(int64_t length, int64_t max_per_rank);

}  // namespace lockstep
