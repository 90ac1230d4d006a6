#pragma once

// Internal. No libtorch here.

#include <cstdint>
#include <string>

/// Properties of this build's transport of CPU tensors, see cpu_transport.h.
namespace lockstep {

/// Whether sums add the ranks' terms in group order, with the same bits however a tensor is cut.
/// False if Gloo adds them.
bool sums_in_rank_order();

/// Why another process of this user could not read this one's memory, as another rank of this host
/// would need to; nothing if it could. A child process tries it. ConfigError as for a group.
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

/// Bytes that the transport needs for them besides the tensors.
int64_t reduction_scratch_bytes(const ReductionLoad& load);

}  // namespace lockstep
