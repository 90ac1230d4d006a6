#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/kernels/adamw_scalars.h"

namespace lockstep::kernels {

/// Elements [start, end) of the flat tensors, with or without weight decay.
struct AdamWSegment {
  int64_t start = 0;
  int64_t end = 0;
  bool weight_decay = true;
};

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
/// one device; `grad` may be bf16 beside fp32. `low_precision`, where defined, is bf16 and receives
/// p rounded to nearest even. Allocates nothing of the tensors' size.
/// Elements outside the segments are left alone. Each element's result depends on its own inputs
/// alone, so it is the same bits for every cut into segments, threads or vectors.
void adamw(const at::Tensor& master, const at::Tensor& grad, const at::Tensor& exp_avg,
           const at::Tensor& exp_avg_sq, const at::Tensor& low_precision,
           const std::vector<AdamWSegment>& segments, const AdamWScalars& scalars);

}  // namespace lockstep::kernels
