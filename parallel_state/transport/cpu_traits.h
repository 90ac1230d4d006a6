#pragma once

// Internal. No libtorch here.

#include <cstdint>
#include <string>

/// What holds of this build's transport of CPU tensors, see cpu_transport.h.
namespace lockstep {

/// Whether sums add the ranks' terms in the order of the group, with the same bits however a tensor
/// is cut. Not so where Gloo adds them.
bool sums_in_rank_order();

/// Why another process of this user could not read this one's memory, as another rank of this host
/// would have to; nothing if it could. A child process tries. ConfigError as for a group.
std::string direct_memory_obstacle();

/// Reductions that a rank may start before it waits for the first.
struct ReductionLoad {
  int64_t count = 0;
  int64_t largest = 0;  ///< elements of the largest
  int64_t total = 0;    ///< elements of all
  int64_t ranks = 1;
  int64_t item = 4;       ///< bytes of an element
  bool scatters = false;  ///< reduce-scatters, not all-reduces
};

/// Bytes that the transport takes for them beside the tensors.
int64_t reduction_scratch_bytes(const ReductionLoad& load);

}  // namespace lockstep
