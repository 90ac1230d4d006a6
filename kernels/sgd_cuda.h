#pragma once

// Internal.

#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/kernels/sgd.h"

namespace lockstep::kernels {

/// sgd() for CUDA tensors, on the current stream. Throws UsageError in a build without CUDA.
void sgd_cuda(const at::Tensor& master, const at::Tensor& grad, const at::Tensor& momentum_buffer,
              const at::Tensor& low_precision, const std::vector<UpdateSegment>& segments,
              const SgdScalars& scalars, const StepControl& control);

}  // namespace lockstep::kernels
