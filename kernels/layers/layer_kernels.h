#pragma once

// Internal: which kernels run the layer operations.

#include <ATen/core/Tensor.h>

#include "lockstep/kernels/device_kernels.h"

namespace lockstep::kernels {

/// The kernels for the device of `tensor`, which may be the CPU; those of layers are set.
/// UsageError, naming `kernel`, if there are none.
const DeviceKernels& layer_kernels(const char* kernel, const at::Tensor& tensor);

/// The CPU's, see DeviceKernels.
void cross_entropy_cpu(const CrossEntropyTensors& t);
void cross_entropy_losses_cpu(const CrossEntropyTensors& t);
void cross_entropy_gradient_cpu(const CrossEntropyTensors& t);
void dropout_cpu(const DropoutTensors& t);
void norm_cpu(const NormTensors& t);
void norm_gradient_cpu(const NormGradientTensors& t);
void rotary_cpu(const RotaryTensors& t);
void swiglu_cpu(const at::Tensor& inner, const at::Tensor& result);
void swiglu_gradient_cpu(const at::Tensor& grad, const at::Tensor& inner,
                         const at::Tensor& of_inner);

}  // namespace lockstep::kernels
