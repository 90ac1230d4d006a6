#pragma once

// Internal.

#include <memory>

#include "lockstep/parallel_state/launch_environment.h"
#include "lockstep/parallel_state/membership.h"

namespace lockstep {

/// Meets the other ranks of `environment` in a store and claims this rank there: in that of
/// torchrun's agent where it serves one, else in one that rank 0 serves at
/// environment.store_address(), listening at that address alone. Null for a single process.
///
/// CommunicationError names address and port: in use; not reached within spec.timeout; a store of
/// another run (names both run ids).
std::unique_ptr<Membership> join_run(const LaunchEnvironment& environment, MembershipSpec spec);

}  // namespace lockstep
