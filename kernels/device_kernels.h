#pragma once

// Internal: who updates tensors that are not on the CPU.

#include <ATen/core/Tensor.h>

#include "lockstep/kernels/adamw_scalars.h"
#include "lockstep/kernels/sgd_scalars.h"
#include "lockstep/kernels/step_control.h"
#include "lockstep/kernels/update_segment.h"

namespace lockstep::kernels {

/// The kernels of a type of device: adamw(), sgd() and sum_of_squares() of checked operands. They
/// are called with the operands' device current and start on its current stream. Nothing waits for
/// the device.
struct DeviceKernels {
  void (*adamw)(const at::Tensor& master, const at::Tensor& grad, const at::Tensor& exp_avg,
                const at::Tensor& exp_avg_sq, const at::Tensor& low_precision,
                const UpdateSegments& segments, const AdamWScalars& scalars,
                const StepControl& control) = nullptr;
  void (*sgd)(const at::Tensor& master, const at::Tensor& grad, const at::Tensor& momentum_buffer,
              const at::Tensor& low_precision, const UpdateSegments& segments,
              const SgdScalars& scalars, const StepControl& control) = nullptr;
  at::Tensor (*sum_of_squares)(const at::Tensor& flat) = nullptr;
};

/// What runs for tensors of `type`. UsageError, naming `kernel`, where nothing does.
const DeviceKernels& device_kernels(const char* kernel, c10::DeviceType type);

/// Of another type than CUDA, before its first use.
void register_device_kernels(c10::DeviceType type, const DeviceKernels& kernels);

/// Ours of CUDA; all null in a build without it.
DeviceKernels cuda_kernels();

}  // namespace lockstep::kernels
