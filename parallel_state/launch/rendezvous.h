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
/// With spec.secret, or else the environment's (job_secret.h), rank 0's store answers only those
/// who have proved that they know it; in torchrun's store the ranks compare what they sign with it.
///
/// CommunicationError names address and port: in use; not reached within spec.timeout; a store of
/// another run (names both run ids); another secret than rank 0's. ConfigError: no usable secret.
std::unique_ptr<Membership> join_run(const LaunchEnvironment& environment, MembershipSpec spec);

}  // namespace lockstep
