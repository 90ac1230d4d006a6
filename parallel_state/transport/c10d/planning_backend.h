#pragma once

// Internal.

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "lockstep/parallel_state/backends.h"

namespace lockstep {

/// Answers every call at once, as if all ranks of the group had sent what this one sends.
c10::intrusive_ptr<c10d::Backend> make_planning_backend(const BackendSpec& spec);

}  // namespace lockstep
