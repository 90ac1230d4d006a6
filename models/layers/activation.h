#pragma once

#include <ATen/core/Tensor.h>

#include "lockstep/core/config.h"

namespace lockstep {

/// Between the two linear layers of a feed-forward network. swiglu: `inner` [..., 2 * width], the
/// gate first, -> [..., width], of which backward keeps `inner` alone; gelu, gelu_tanh: [...,
/// width] -> the same shape. Backward of swiglu with create_graph is a UsageError.
at::Tensor activate(Activation activation, const at::Tensor& inner);

}  // namespace lockstep
