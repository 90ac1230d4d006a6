#include <algorithm>

#include "lockstep/core/integers.h"
#include "lockstep/parallel_state/cpu_traits.h"
#include "lockstep/parallel_state/host_chunks.h"

namespace lockstep {

bool sums_in_rank_order() { return true; }

int64_t reduction_scratch_bytes(const ReductionLoad& load) {
  const int64_t under_way = std::min(load.count, kHostWorkers);
  return checked_mul(under_way,
                     host_scratch_bytes(ceil_div(load.largest, load.ranks), load.ranks, load.item),
                     "bytes");
}

}  // namespace lockstep
