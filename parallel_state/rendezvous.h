#pragma once

// Internal.

#include <chrono>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/parallel_state/launch_environment.h"

namespace lockstep {

/// The store through which the ranks of `environment` meet: null for a single process, torchrun's
/// where its agent serves one, else served by rank 0 at master_address:master_port. Throws
/// CommunicationError naming the address if it cannot be reached within `timeout`.
c10::intrusive_ptr<c10d::Store> connect_store(const LaunchEnvironment& environment,
                                              std::chrono::milliseconds timeout);

}  // namespace lockstep
