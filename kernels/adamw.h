#pragma once

#include <ATen/core/Tensor.h>

#include "lockstep/kernels/adamw_scalars.h"
#include "lockstep/kernels/step_control.h"
#include "lockstep/kernels/update_segment.h"

namespace lockstep::kernels {

/// One pass over flat tensors of n elements (Loshchilov and Hutter, "Decoupled weight decay
/// regularization", 2019, as in torch.optim.AdamW):
///
///   g  = grad_scale * grad
///   p  = (1 - learning_rate * weight_decay) * p
///   m  = beta1 * m + (1 - beta1) * g
///   v  = beta2 * v + (1 - beta2) * g^2
///   p -= learning_rate / bias_correction1 * m / (sqrt(v / bias_correction2) + eps)
///
/// `master` (p), `grad`, `exp_avg` (m) and `exp_avg_sq` (v) are fp32 or all fp64, contiguous, on
/// one device; with fp32, `grad` may be bf16 or fp16 and each moment bf16, rounded to nearest even
/// after the step, which uses them unrounded. `low_precision`, if defined, is bf16 or fp16 and
/// receives p rounded to nearest even. Allocates nothing of the tensors' size. On CUDA the host
/// does not wait for the device.
/// Elements outside the segments are not changed. Each element's result depends only on its own
/// inputs, so it has the same bits for every division into segments, threads or vectors.
void adamw(const at::Tensor& master, const at::Tensor& grad, const at::Tensor& exp_avg,
           const at::Tensor& exp_avg_sq, const at::Tensor& low_precision,
           const UpdateSegments& segments, const AdamWScalars& scalars,
           const StepControl& control = {});

}  // namespace lockstep::kernels
