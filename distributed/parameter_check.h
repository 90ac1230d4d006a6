#pragma once

// Internal.

#include <vector>

#include "lockstep/core/parameters.h"
#include "lockstep/distributed/param_and_grad_buffer.h"
#include "lockstep/parallel_state/process_group.h"

namespace lockstep {

/// Compares the parameters of all ranks of `group`: names, order, shapes, dtypes, descriptions and
/// whether they require a gradient. Every rank throws the same CommunicationError, with the first
/// difference, if there is one. Sends 8 bytes per rank while all agree.
void check_same_parameters(const std::vector<NamedParameter>& parameters,
                           const ProcessGroup& group);

/// UsageError naming the first parameter that is no longer a view of `buffer`, none of whose
/// gathers is under way.
void check_params_attached(const ParamAndGradBuffer& buffer);

}  // namespace lockstep
