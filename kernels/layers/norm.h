#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::kernels {

enum class NormKind { rms, layer };

/// The result of norm_forward(), including what backward needs.
struct NormResult {
  at::Tensor sum;         ///< x + residual, like x, or x itself without a residual
  at::Tensor normalized;  ///< like x
  at::Tensor mean;        ///< of the rows of `sum`: [rows]; undefined for RMSNorm
  at::Tensor root;        ///< the factor of each row: [rows]
};

/// s = x + residual, rounded to their dtype, with its rows normalized (Zhang and Sennrich, "Root
/// mean square layer normalization", 2019; Ba et al., "Layer normalization", 2016):
///
///   rms:    root = 1 / sqrt(mean(s^2) + epsilon),            s * root * weight
///   layer:  root = 1 / sqrt(mean((s - mean)^2) + epsilon),   (s - mean) * root * weight + bias
///
/// `x` [..., width] of fp32, fp64, bf16 or fp16; `residual` like it, or undefined; `weight` and,
/// for layer, `bias` [width] of any of these dtypes. Everything is computed in fp32, or in fp64 for
/// fp64; mean and root have that dtype. The same bits for any number of threads. The host does not
/// wait for a device. UsageError for another dtype.
NormResult norm_forward(NormKind kind, const at::Tensor& x, const at::Tensor& residual,
                        const at::Tensor& weight, const at::Tensor& bias, double epsilon);

struct NormGradients {
  at::Tensor input;         ///< of x, and of the residual: like x
  at::Tensor weight, bias;  ///< [width], in the dtype of the computation; undefined unless wanted
};

/// Backward of `forward`: `grad` is the gradient of its `normalized`, `sum_grad` that of its `sum`
/// or undefined for zero. Terms of the parameters' gradients are added in an order that depends
/// only on the shape and the type of device.
NormGradients norm_backward(NormKind kind, const at::Tensor& grad, const at::Tensor& sum_grad,
                            const NormResult& forward, const at::Tensor& weight,
                            bool of_parameters);

}  // namespace lockstep::kernels
