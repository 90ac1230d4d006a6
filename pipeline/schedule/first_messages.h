#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "lockstep/pipeline/communication_steps.h"

/// On NCCL ranks are connected by their messages: the first one of a direction, from one rank to
/// another, holds up the host of either end until the other end makes it too. Later ones hold up
/// nobody. So ranks whose first messages differ can wait for each other in a circle.
namespace lockstep {

using RankPairs = std::vector<std::pair<int64_t, int64_t>>;

/// The ranks that exchange messages, the lower one first, in ascending order.
RankPairs message_pairs(const StepLists& steps);

/// Looks where the hosts are held up when each rank connects its pairs of `connected` first, in the
/// order of the list, from the first rank of a pair to the second and then back, as connect_pairs()
/// does, and then takes its steps, with receives as early as early_receives() allows. UsageError
/// that says at which message each rank is stuck, if they wait for each other.
void check_first_messages(const StepLists& steps, const RankPairs& connected);

}  // namespace lockstep
