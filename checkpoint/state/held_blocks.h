#pragma once

// Internal.

#include <map>
#include <string>
#include <vector>

#include "lockstep/checkpoint/tensor_box.h"
#include "lockstep/core/parameters.h"
#include "lockstep/parallel_state/parallel_state.h"

namespace lockstep {

/// The block of each whole parameter that this rank holds, padding included, by name. Ranks may
/// hold pieces of any lengths. Collective over the axes that cut any of `parameters`; the ranks of
/// such an axis must list the same names. CommunicationError naming a parameter and a rank that
/// does not list it.
std::map<std::string, TensorBox> held_blocks(const std::vector<NamedParameter>& parameters,
                                             const ParallelState& state);

}  // namespace lockstep
