#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::kernels {

/// What a step learns from its gradients: fp64 [2], on the device of the tensors, so that nobody
/// waits for it. Element 0 takes the place of the scalars' grad_scale; where element 1 is 0 the
/// kernel leaves everything as it is, and element 0 has no meaning. Undefined: the scalars hold.
using StepControl = at::Tensor;

}  // namespace lockstep::kernels
