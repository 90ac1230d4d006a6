#pragma once

// Internal.

#include <vector>

#include "lockstep/parallel_state/process_group.h"

namespace lockstep {

/// Compares what the ranks of each group have done so far, by one all-gather of 16 bytes per group,
/// all at the same time. CommunicationError on every rank of a group whose ranks differ, with the
/// first operation in which they do. Every rank must call it with all its groups.
void check_in_step(const std::vector<ProcessGroup>& groups);

}  // namespace lockstep
