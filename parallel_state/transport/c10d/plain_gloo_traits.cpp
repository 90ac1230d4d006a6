#include "lockstep/core/integers.h"
#include "lockstep/parallel_state/cpu_traits.h"

namespace lockstep {

bool sums_in_rank_order() { return false; }

std::string direct_memory_obstacle() {
  return "this build has no host transport, LOCKSTEP_HOST_TRANSPORT=OFF";
}

/// A reduce-scatter receives its terms in extra memory. An all-reduce widens types narrower than
/// fp32.
int64_t reduction_scratch_bytes(const ReductionLoad& load) {
  constexpr int64_t kWide = 4;
  if (load.ranks == 1) return 0;
  if (load.scatters) return checked_mul(load.total, load.item, "bytes");
  return load.item < kWide ? checked_mul(load.total, kWide, "bytes") : 0;
}

}  // namespace lockstep
