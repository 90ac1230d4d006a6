#pragma once

// Internal.

#include <cstdint>

#include "lockstep/parallel_state/collective_operation.h"

namespace lockstep {

/// Bytes that a rank sends for an operation on an input of `bytes` in a group of `size` ranks: for
/// a collective those of a ring, see plan_links(); for a message all. 0 for an operation that only
/// receives.
int64_t ring_bytes(CollectiveOperation::Kind kind, int64_t bytes, int64_t size);

}  // namespace lockstep
