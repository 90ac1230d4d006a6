#pragma once

#include <string>

namespace lockstep {

/// Runs two ranks as threads of this process over Gloo, on the interface that a job of several
/// hosts would use, and lets them reduce a tensor. Returns what went wrong, or nothing. Ends within
/// 20 s.
std::string two_rank_self_test();

}  // namespace lockstep
