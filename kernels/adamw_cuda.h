#pragma once

// Internal.

#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/kernels/adamw.h"

namespace lockstep::kernels {

/// adamw() for CUDA tensors, on the current stream. Throws UsageError in a build without CUDA.
void adamw_cuda(const at::Tensor& master, const at::Tensor& grad, const at::Tensor& exp_avg,
                const at::Tensor& exp_avg_sq, const at::Tensor& low_precision,
                const std::vector<UpdateSegment>& segments, const AdamWScalars& scalars,
                const StepControl& control);

}  // namespace lockstep::kernels
