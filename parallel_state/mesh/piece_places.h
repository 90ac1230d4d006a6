#pragma once

// Internal.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "lockstep/core/parameters.h"
#include "lockstep/parallel_state/parallel_state.h"

namespace lockstep {

/// Where a rank's piece of a parameter lies in the whole: one number per dimension.
struct PiecePlace {
  std::vector<int64_t> whole;  ///< shape of the whole parameter
  std::vector<int64_t> start;  ///< of the piece
};

/// That of this rank's piece of each parameter, padding included, by name. Ranks may hold pieces of
/// any lengths. Collective over the axes that cut any of `parameters`; the ranks of such an axis
/// must list the same names. Errors begin with `caller`. CommunicationError naming a parameter and
/// a rank that does not list it.
std::map<std::string, PiecePlace> piece_places(const std::vector<NamedParameter>& parameters,
                                               const ParallelState& state, const char* caller);

}  // namespace lockstep
