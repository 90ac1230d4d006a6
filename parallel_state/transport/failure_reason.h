#pragma once

// Internal.

#include <exception>
#include <string>

#include "lockstep/parallel_state/rank_generator.h"

namespace lockstep {

/// The message without the C++ stack trace that c10::Error appends, and without the location in
/// Gloo's sources.
std::string reason_of(const std::exception& error);

/// The same for an error in a group of these ranks; it names another rank by its global number.
std::string reason_of(const std::exception& error, const RankList& ranks);

}  // namespace lockstep
