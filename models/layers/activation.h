#pragma once

#include <ATen/core/Tensor.h>

#include "lockstep/core/config.h"

namespace lockstep {

/// The activation between the two linear layers of a feed-forward network. swiglu: `inner`
/// [..., 2 * width], the gate first, -> [..., width]; only `inner` is kept for backward. gelu,
/// gelu_tanh: [..., width] -> the same shape. Backward of swiglu with create_graph is a UsageError.
at::Tensor activate(Activation activation, const at::Tensor& inner);

}  // namespace lockstep
