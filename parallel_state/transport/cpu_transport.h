#pragma once

// Internal: this build's transport of CPU tensors. CMake chooses the implementation: host/ or, with
// LOCKSTEP_HOST_TRANSPORT=OFF, c10d/plain_gloo.cpp.

#include <chrono>
#include <functional>
#include <memory>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "lockstep/parallel_state/transport.h"

namespace lockstep {

/// Creates the transport of a group's CPU tensors over its c10d group. Operations time out after
/// `timeout`.
using TransportMaker = std::function<std::unique_ptr<Transport>(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, std::chrono::milliseconds timeout)>;

/// `observed`: the group's backend is not plain Gloo, and may want to see every byte. ConfigError
/// if the environment's setting for it is invalid; the ranks need not have met.
TransportMaker cpu_transport(bool observed);

}  // namespace lockstep
