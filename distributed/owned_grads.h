#pragma once

// Internal.

#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/distributed/param_and_grad_buffer.h"

namespace lockstep {

/// The parts of `range` of `buffer` whose reduced gradients this rank holds (see
/// ParamAndGradBuffer::owned), as flat views, none of them empty.
std::vector<at::Tensor> owned_grads(const ParamAndGradBuffer& buffer, ElementRange range);

/// The same for the whole buffer.
std::vector<at::Tensor> owned_grads(const ParamAndGradBuffer& buffer);

}  // namespace lockstep
