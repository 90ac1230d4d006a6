#pragma once

// Internal.

#include <ATen/core/Tensor.h>

namespace lockstep::kernels {

/// sum_of_squares() for CUDA tensors. Throws UsageError in a build without CUDA.
at::Tensor sum_of_squares_cuda(const at::Tensor& flat);

}  // namespace lockstep::kernels
