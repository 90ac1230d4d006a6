#pragma once

// Internal.

#include <map>
#include <string>
#include <vector>

#include "lockstep/checkpoint/tensor_box.h"
#include "lockstep/core/parameters.h"
#include "lockstep/parallel_state/parallel_state.h"

namespace lockstep {

/// The block of each whole parameter that this rank holds, padding included, by name: its
/// piece_places(), with the same communication and errors.
std::map<std::string, TensorBox> held_blocks(const std::vector<NamedParameter>& parameters,
                                             const ParallelState& state);

}  // namespace lockstep
