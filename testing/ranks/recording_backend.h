#pragma once

// Internal.

#include <string>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "lockstep/testing/collective_log.h"

namespace lockstep::testing {

/// Passes every call on to `inner` and records it in `log`.
c10::intrusive_ptr<c10d::Backend> make_recording_backend(c10::intrusive_ptr<c10d::Backend> inner,
                                                         BackendLog* log, std::string group,
                                                         int64_t global_rank);

}  // namespace lockstep::testing
