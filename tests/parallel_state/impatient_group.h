#pragma once

#include <chrono>

#include "lockstep/parallel_state/collectives.h"
#include "lockstep/parallel_state/parallel_state.h"
#include "lockstep/tests/support/rank_threads.h"

namespace lockstep::testing {

/// For tests of a wait after the ranks have met. They have the usual time to meet; only their group
/// dp, which holds all of them, waits no longer than `limit`.
inline RankThreadOptions with_impatient_group(std::chrono::milliseconds limit) {
  RankThreadOptions options;
  options.adjust = [limit](int64_t /*rank*/, ParallelStateOptions& made) {
    made.group_options[GroupKind::dp].timeout = limit;
  };
  return options;
}

/// That group. The ranks come to it together, because its limit also bounds connecting it.
inline ProcessGroup impatient_group(const ParallelState& state) {
  barrier(state.world(), "before the impatient group");
  return state.group(GroupKind::dp);
}

}  // namespace lockstep::testing
