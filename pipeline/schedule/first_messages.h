#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "lockstep/pipeline/communication_steps.h"

/// With NCCL, messages connect the ranks: the first message from one rank to another blocks the
/// hosts of both until the other side makes the matching call. Later messages in the same direction
/// do not block. So ranks whose first messages differ can deadlock.
namespace lockstep {

using RankPairs = std::vector<std::pair<int64_t, int64_t>>;

/// The ranks that exchange messages, the lower one first, in ascending order.
RankPairs message_pairs(const StepLists& steps);

/// Simulates where the hosts block. Each rank first connects its pairs of `connected`, in the order
/// of the list, from the first rank of a pair to the second and then back, as connect_pairs() does.
/// Then it takes its steps, with receives as early as early_receives() allows. If the ranks wait
/// for each other, throws a UsageError that says at which message each rank is stuck.
void check_first_messages(const StepLists& steps, const RankPairs& connected);

}  // namespace lockstep
