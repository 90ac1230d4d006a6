#pragma once

#include <ATen/core/Tensor.h>

#include "lockstep/core/config.h"

namespace lockstep {

/// Between the two linear layers of a feed-forward network. swiglu: `inner` [..., 2 * width], the
/// gate first, -> [..., width]; gelu, gelu_tanh: [..., width] -> the same shape.
at::Tensor activate(Activation activation, const at::Tensor& inner);

}  // namespace lockstep
