#pragma once

// Internal.

#include <memory>

#include "lockstep/parallel_state/launch_environment.h"
#include "lockstep/parallel_state/membership.h"

namespace lockstep {

/// Meets the other ranks of `environment` in a store and claims this rank there: in the store of
/// torchrun's agent if it serves one, otherwise in one that rank 0 serves at
/// environment.store_address(), listening only at that address. Null for a single process.
///
/// In the agent's store the ranks of a round (AgentRounds) meet apart from those of earlier rounds,
/// whatever their agents have counted; Membership::round() says which it is.
///
/// With spec.secret, or otherwise the environment's secret (job_secret.h), rank 0's store answers
/// only clients that have proved that they know it; in torchrun's store the ranks compare what they
/// sign with it.
///
/// CommunicationError names address and port: in use; not reached within spec.timeout; a store of
/// another run (names both run ids); a secret that is not rank 0's; in the agent's store, a rank 0
/// that does not come or has left. ConfigError: no usable secret.
std::unique_ptr<Membership> join_run(const LaunchEnvironment& environment, MembershipSpec spec);

/// The same in `store`, through a clone. A server that `store` owns lives as long as the
/// membership, even if others keep the clone.
std::unique_ptr<Membership> join_run(const c10::intrusive_ptr<c10d::Store>& store,
                                     MembershipSpec spec);

}  // namespace lockstep
