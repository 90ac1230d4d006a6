#pragma once

// Internal: the gradient of a linear layer's weight, inside its backward.

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "lockstep/core/gradient_capture.h"

namespace lockstep {

/// [..., n] -> [rows, n]
at::Tensor as_matrix(const at::Tensor& x);

/// rows^T x, in the shape of `weight` [..., in]: `rows` [tokens, out] is the output's gradient, `x`
/// [tokens, in] the input.
at::Tensor weight_gradient(const at::Tensor& weight, const at::Tensor& rows, const at::Tensor& x);

/// Whether a wrapper such as DistributedDataParallel waits for the gradient in weight.grad() (a
/// post-accumulate-gradient hook). Autograd calls the hook even if it gets no gradient.
bool is_awaited_in_grad(const at::Tensor& weight);

/// weight_gradient(), added to weight.grad() by the product itself, if it is awaited there: for a
/// gradient of the operands' dtype, and on the CPU and CUDA for one in fp32 under bf16 and fp16
/// operands, without rounding in between. Otherwise returns false and adds nothing.
bool add_weight_gradient(const at::Tensor& weight, const at::Tensor& rows, const at::Tensor& x);

/// Whether this backward is torch::autograd::grad(), which leaves .grad() alone.
bool is_capturing();

/// The backward in which the running node is; that of a recomputed function is part of another.
OuterBackward outer_backward();

/// Whether this backward gives the caller the gradient of input number `index` of the running node.
bool is_captured(uint32_t index);

}  // namespace lockstep
