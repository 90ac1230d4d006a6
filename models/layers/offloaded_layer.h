#pragma once

// Internal.

#include <functional>

#include <ATen/core/Tensor.h>

#include "lockstep/models/activation_offload.h"

namespace lockstep {

/// layer(input), of which everything waits in the host's memory that autograd keeps of it: the
/// memory that libtorch's operators gave out on this thread meanwhile, and that somebody still has
/// when it is over. Of the tensors themselves nothing changes but that their memory goes, and is
/// back before the backward of the layer begins, which is when the output's gradient is there. What
/// is not the layer's own stays: parameters, what others have made, the output, and what has less
/// than four bytes a row of the input. Nobody else may read or write what the layer keeps once the
/// next one has run, which nothing can stop. `owns_input`: what made the input does not need its
/// memory any more.
at::Tensor run_offloaded(ActivationOffload& offload, at::Tensor input, bool owns_input,
                         const std::function<at::Tensor(const at::Tensor&)>& layer);

}  // namespace lockstep
