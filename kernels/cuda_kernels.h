#pragma once

// Internal: our CUDA kernels, see DeviceKernels.

#include <ATen/core/Tensor.h>

#include "lockstep/kernels/adamw_scalars.h"
#include "lockstep/kernels/device_graph.h"
#include "lockstep/kernels/device_kernels.h"
#include "lockstep/kernels/sgd_scalars.h"
#include "lockstep/kernels/step_control.h"
#include "lockstep/kernels/update_segment.h"

namespace lockstep::kernels {

void adamw_cuda(const at::Tensor& master, const at::Tensor& grad, const at::Tensor& exp_avg,
                const at::Tensor& exp_avg_sq, const at::Tensor& low_precision,
                const UpdateSegments& segments, const AdamWScalars& scalars,
                const StepControl& control);

void sgd_cuda(const at::Tensor& master, const at::Tensor& grad, const at::Tensor& momentum_buffer,
              const at::Tensor& low_precision, const UpdateSegments& segments,
              const SgdScalars& scalars, const StepControl& control);

at::Tensor sum_of_squares_cuda(const at::Tensor& flat);
at::Tensor fingerprint_cuda(const at::Tensor& bytes);

void cross_entropy_cuda(const CrossEntropyTensors& t);
void cross_entropy_losses_cuda(const CrossEntropyTensors& t);
void cross_entropy_gradient_cuda(const CrossEntropyTensors& t);
void dropout_cuda(const DropoutTensors& t);
void to_fp8_cuda(const Fp8Tensors& t);
at::Tensor scaled_mm_cuda(const Fp8Matrix& a, const Fp8Matrix& b,
                          const std::optional<at::Tensor>& bias, at::ScalarType dtype,
                          bool fast_sums);
void norm_cuda(const NormTensors& t);
void norm_gradient_cuda(const NormGradientTensors& t);
void rotary_cuda(const RotaryTensors& t);
void swiglu_cuda(const at::Tensor& inner, const at::Tensor& result);
void swiglu_gradient_cuda(const at::Tensor& grad, const at::Tensor& inner,
                          const at::Tensor& of_inner);

at::Tensor grouped_rows_cuda(const at::Tensor& x, const at::Tensor& matrices,
                             const at::Tensor& ends);
at::Tensor grouped_matrices_cuda(const at::Tensor& a, const at::Tensor& b, const at::Tensor& ends);
at::Tensor grouped_sums_cuda(const at::Tensor& x, const at::Tensor& none, const at::Tensor& ends);

/// Sets the contiguous `matrices` [groups, m, n] of groups without rows to zero. The size of a
/// matrix must be a multiple of 16 bytes.
void zero_empty_groups_cuda(const at::Tensor& matrices, const at::Tensor& ends);

std::unique_ptr<DeviceGraph> make_cuda_graph();

}  // namespace lockstep::kernels
