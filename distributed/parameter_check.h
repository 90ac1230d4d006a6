#pragma once

// Internal.

#include <vector>

#include "lockstep/core/config_io.h"
#include "lockstep/core/parameters.h"
#include "lockstep/distributed/param_and_grad_buffer.h"
#include "lockstep/parallel_state/process_group.h"

namespace lockstep {

class DistributedDataParallel;

/// Compares the parameters of all ranks of `group`: names, order, shapes, dtypes, descriptions and
/// whether they require a gradient; and `settings`. Every rank throws the same CommunicationError,
/// with the first difference, if there is one. Sends 8 bytes per rank while all agree. `cut_over`:
/// axes of which the group may have several ranks; what these cut is left out of the shapes.
///
/// Then UsageError, on every rank, naming the first parameter whose description contradicts itself
/// (see ParamDescription::validate).
void check_same_parameters(const std::vector<NamedParameter>& parameters, const ProcessGroup& group,
                           const std::vector<ConfigValue>& settings = {},
                           const std::vector<MeshAxis>& cut_over = {});

/// UsageError naming `caller`: no model, a null pointer, a model that is listed twice.
void check_model_list(const std::vector<DistributedDataParallel*>& models, const char* caller);

/// UsageError naming the first parameter that is no longer a view of `buffer`, none of whose
/// gathers is under way.
void check_params_attached(const ParamAndGradBuffer& buffer);

}  // namespace lockstep
