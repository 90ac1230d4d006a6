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

/// Whether a layer may add the gradient to weight.grad() itself: a wrapper such as
/// DistributedDataParallel waits for it there (a post-accumulate-gradient hook, which autograd
/// calls even if it gets no gradient), and the tensor has no hook of its own
/// (Tensor::register_hook()), which has to see the gradient first.
bool is_awaited_in_grad(const at::Tensor& weight);

/// If the wrapper leaves weight.grad() undefined until the gradient arrives, as it does if
/// gradients are sharded: zeros to which a layer adds the gradient instead. So the same library
/// computes the product, and the bits are those of a zeroed weight.grad(). Undefined for other
/// weights, for narrow ones, whose gradients may be added up in a wider dtype, and for those that
/// are not on the CPU, where these bits are not promised.
at::Tensor zeros_in_place_of_grad(const at::Tensor& weight);

/// weight_gradient(), added to the contiguous `grad` by the product itself: to a gradient of the
/// operands' dtype, and on the CPU and CUDA to one in fp32 under bf16 and fp16 operands, without
/// rounding in between. Otherwise returns false and adds nothing.
bool add_to_gradient(const at::Tensor& grad, const at::Tensor& rows, const at::Tensor& x);

/// add_to_gradient() of weight.grad(), if the gradient is awaited there.
bool add_weight_gradient(const at::Tensor& weight, const at::Tensor& rows, const at::Tensor& x);

/// Whether this backward is torch::autograd::grad(), which leaves .grad() alone.
bool is_capturing();

/// The backward in which the running node is; that of a recomputed function is part of another.
OuterBackward outer_backward();

/// Whether this backward gives the caller the gradient of input number `index` of the running node.
bool is_captured(uint32_t index);

}  // namespace lockstep
