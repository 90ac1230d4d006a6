#pragma once

// Internal: our kernels of CUDA, see DeviceKernels.

#include <ATen/core/Tensor.h>

#include "lockstep/kernels/adamw_scalars.h"
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

}  // namespace lockstep::kernels
