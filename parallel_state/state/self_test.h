#pragma once

#include <functional>
#include <string>

#include "lockstep/parallel_state/parallel_state.h"

namespace lockstep {

/// Runs two ranks as threads of this process over Gloo, on the interface that a job on several
/// hosts would use, and has them reduce a tensor. Returns what went wrong, or nothing. Ends within
/// 20 s.
std::string two_rank_self_test();

/// The work of one of two ranks.
using TwoRankBody = std::function<void(const ParallelState& state)>;

/// Runs two ranks of one host as threads of this process, and throws the error of the first rank
/// that has one.
void run_two_ranks(const TwoRankBody& body);

}  // namespace lockstep
