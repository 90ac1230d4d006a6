#pragma once

// Internal.

#include "lockstep/parallel_state/membership.h"
#include "lockstep/parallel_state/parallel_state.h"

namespace lockstep {

/// How rank `rank` joins a run with `options`: what it announces, with this build and libtorch.
MembershipSpec membership_spec(const ParallelStateOptions& options, int64_t rank);

}  // namespace lockstep
