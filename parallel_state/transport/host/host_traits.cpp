#include <algorithm>

#include "lockstep/core/integers.h"
#include "lockstep/parallel_state/cpu_traits.h"
#include "lockstep/parallel_state/host_chunks.h"

namespace lockstep {

bool sums_in_rank_order() { return true; }

int64_t reduction_scratch_bytes(const ReductionLoad& load) {
  const int64_t slice = ceil_div(load.largest, load.ranks);
  const auto at_once = [&](int64_t threads, int64_t bytes) {
    return checked_mul(std::min(load.count, threads), bytes, "bytes");
  };
  // Where memory is read, the thread that waits adds too.
  return std::max(at_once(kHostWorkers, host_scratch_bytes(slice, load.ranks, load.item)),
                  at_once(kHostWorkers + 1, direct_scratch_bytes(slice, load.ranks, load.item)));
}

}  // namespace lockstep
