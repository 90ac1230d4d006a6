#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::kernels {

/// silu(gate) * up, where silu(x) = x / (1 + e^-x) (Shazeer, "GLU variants improve transformer",
/// 2020): `inner` [..., 2 * width], the gate first, of fp32, fp64, bf16 or fp16 -> [..., width].
/// Computed in fp32, or in fp64 for fp64, and rounded once. The host does not wait for a device.
/// UsageError for another dtype.
at::Tensor swiglu(const at::Tensor& inner);

/// The gradient of `inner`, from the gradient `grad` of the result.
at::Tensor swiglu_backward(const at::Tensor& grad, const at::Tensor& inner);

}  // namespace lockstep::kernels
