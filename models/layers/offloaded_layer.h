#pragma once

// Internal.

#include <functional>

#include <ATen/core/Tensor.h>

#include "lockstep/models/activation_offload.h"

namespace lockstep {

/// layer(input). Everything that autograd keeps of it waits in the host's memory: the memory that
/// libtorch's operators allocated on this thread in the meantime and that is still in use when the
/// layer has run. The tensors themselves do not change, except that their memory is freed. It is
/// back before the backward of the layer begins, which is when the output's gradient has arrived.
/// What is not the layer's own stays on the device: parameters, what others have made, the output,
/// and what has less than four bytes per row of the input. Once the next layer has run, nobody else
/// may read or write what this layer keeps; nothing can prevent it. `owns_input`: whatever made the
/// input does not need its memory any more.
at::Tensor run_offloaded(ActivationOffload& offload, at::Tensor input, bool owns_input,
                         const std::function<at::Tensor(const at::Tensor&)>& layer);

}  // namespace lockstep
