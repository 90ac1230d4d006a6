#pragma once

#include <ATen/core/Tensor.h>

#include "lockstep/kernels/sgd_scalars.h"
#include "lockstep/kernels/step_control.h"
#include "lockstep/kernels/update_segment.h"

namespace lockstep::kernels {

/// One pass over flat tensors of n elements, like torch.optim.SGD without dampening:
///
///   g  = grad_scale * grad + weight_decay * p
///   b  = momentum * b + g
///   p -= learning_rate * b
///
/// Tensors, segments, `low_precision` and `control` are as in adamw(). `momentum_buffer` (b) is
/// undefined if there is no momentum; then p -= learning_rate * g.
void sgd(const at::Tensor& master, const at::Tensor& grad, const at::Tensor& momentum_buffer,
         const at::Tensor& low_precision, const UpdateSegments& segments, const SgdScalars& scalars,
         const StepControl& control = {});

}  // namespace lockstep::kernels
