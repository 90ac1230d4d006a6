#pragma once

#include <functional>
#include <optional>
#include <string>

#include "lockstep/parallel_state/parallel_state.h"

namespace lockstep {

/// Runs `body` for every rank of the world, one after the other, as planning ranks
/// (ParallelState::planning_rank), and compares what they communicate: in each group all members
/// must make the same collectives in the same order (operation, label, number of elements, dtype),
/// and between two ranks everything that is sent must be received, in the same order. Returns the
/// first difference, with group, ranks, operation and label, or nothing. What `body` throws is
/// thrown again as an Error that names the rank.
std::optional<std::string> verify_collectives(
    const ParallelSizes& sizes, const std::function<void(const ParallelState&)>& body);

}  // namespace lockstep
