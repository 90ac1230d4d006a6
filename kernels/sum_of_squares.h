#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::kernels {

/// The sum of the squares of a contiguous fp32, fp64 or bf16 tensor, accumulated in fp64 in a fixed
/// order: the result does not depend on the number of threads. Returns a 0-dim fp64 tensor on the
/// tensor's device; on CUDA the host does not wait for the device.
at::Tensor sum_of_squares(const at::Tensor& flat);

}  // namespace lockstep::kernels
