#pragma once

// Internal.

#include <vector>

#include <torch/nn/module.h>

#include "lockstep/core/parameters.h"

namespace lockstep {

/// The registered buffers of `module`, whose parameters are `parameters`. A buffer gets the
/// description of an expert if all parameters of the module that registered it, including those of
/// its children, are experts; then ranks with other experts have other values. If there are none,
/// the innermost module around it that has parameters decides. All other buffers get the default
/// description.
std::vector<NamedParameter> collect_buffers(const torch::nn::Module& module,
                                            const std::vector<NamedParameter>& parameters);

}  // namespace lockstep
