#pragma once

// Internal.

#include <cstdint>
#include <vector>

#include <torch/nn/module.h>

#include "lockstep/core/parameters.h"

namespace lockstep {

/// number_units() of the modules below `module`, for each of `parameters`, which are its own. A
/// tensor that several modules hold belongs to the unit of the first.
std::vector<int64_t> units_of(const torch::nn::Module& module,
                              const std::vector<NamedParameter>& parameters);

}  // namespace lockstep
