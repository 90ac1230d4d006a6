#pragma once

// Internal.

#include <exception>
#include <string>

#include "lockstep/parallel_state/rank_generator.h"

namespace lockstep {

/// The message without the stack of C++ frames that c10::Error appends, and without the place in
/// Gloo's sources where it arose.
std::string reason_of(const std::exception& error);

/// The same of an error in a group of these ranks; another rank has its global number.
std::string reason_of(const std::exception& error, const RankList& ranks);

}  // namespace lockstep
