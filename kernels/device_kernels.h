#pragma once

// Internal: the kernels for tensors that are not on the CPU.

#include <optional>

#include <ATen/core/Tensor.h>

#include "lockstep/kernels/adamw_scalars.h"
#include "lockstep/kernels/sgd_scalars.h"
#include "lockstep/kernels/step_control.h"
#include "lockstep/kernels/update_segment.h"

namespace lockstep::kernels {

struct CrossEntropyTensors;
struct DropoutTensors;
struct Fp8Matrix;
struct Fp8Tensors;
struct NormTensors;
struct NormGradientTensors;
struct RotaryTensors;

/// The kernels of a type of device: adamw(), sgd(), sum_of_squares() and grouped products, for
/// checked operands. They are called with the operands' device as the current device, and start on
/// its current stream. The host does not wait for the device.
struct DeviceKernels {
  void (*adamw)(const at::Tensor& master, const at::Tensor& grad, const at::Tensor& exp_avg,
                const at::Tensor& exp_avg_sq, const at::Tensor& low_precision,
                const UpdateSegments& segments, const AdamWScalars& scalars,
                const StepControl& control) = nullptr;
  void (*sgd)(const at::Tensor& master, const at::Tensor& grad, const at::Tensor& momentum_buffer,
              const at::Tensor& low_precision, const UpdateSegments& segments,
              const SgdScalars& scalars, const StepControl& control) = nullptr;
  at::Tensor (*sum_of_squares)(const at::Tensor& flat) = nullptr;
  /// fingerprint() of a tensor's memory; null: libtorch's operators compute it.
  at::Tensor (*fingerprint)(const at::Tensor& bytes) = nullptr;

  /// grouped_rows() and the like, see grouped_mm.h, for operands with rows, in launches that read
  /// the groups' `ends` from device memory. They return an undefined tensor if they do not support
  /// the operands; null if the device has no such kernel. grouped_sums() takes an undefined `none`.
  at::Tensor (*grouped_rows)(const at::Tensor& x, const at::Tensor& matrices,
                             const at::Tensor& ends) = nullptr;
  at::Tensor (*grouped_matrices)(const at::Tensor& a, const at::Tensor& b,
                                 const at::Tensor& ends) = nullptr;
  at::Tensor (*grouped_sums)(const at::Tensor& x, const at::Tensor& none,
                             const at::Tensor& ends) = nullptr;

  /// Operations of layers, see cross_entropy_operands.h, dropout_operands.h, fp8_tensors.h,
  /// norm_operands.h, rotary_operands.h and swiglu.h, into tensors that are allocated and have
  /// elements.
  void (*cross_entropy)(const CrossEntropyTensors& tensors) = nullptr;
  void (*cross_entropy_losses)(const CrossEntropyTensors& tensors) = nullptr;
  void (*cross_entropy_gradient)(const CrossEntropyTensors& tensors) = nullptr;
  void (*dropout)(const DropoutTensors& tensors) = nullptr;
  /// From fp32, bf16 or fp16 at an address that is a multiple of 16.
  void (*to_fp8)(const Fp8Tensors& tensors) = nullptr;
  /// scaled_mm() of fp8.h, in a dtype that the device supports; without a bias if that is fp32.
  at::Tensor (*scaled_mm)(const Fp8Matrix& a, const Fp8Matrix& b,
                          const std::optional<at::Tensor>& bias, at::ScalarType dtype,
                          bool fast_sums) = nullptr;
  void (*norm)(const NormTensors& tensors) = nullptr;
  void (*norm_gradient)(const NormGradientTensors& tensors) = nullptr;
  void (*rotary)(const RotaryTensors& tensors) = nullptr;
  void (*swiglu)(const at::Tensor& inner, const at::Tensor& result) = nullptr;
  void (*swiglu_gradient)(const at::Tensor& grad, const at::Tensor& inner,
                          const at::Tensor& of_inner) = nullptr;
};

/// The kernels for tensors on `type`. UsageError, naming `kernel`, if there are none.
const DeviceKernels& device_kernels(const char* kernel, c10::DeviceType type);

/// The same; null if there are none.
const DeviceKernels* find_device_kernels(c10::DeviceType type);

/// Registers kernels for a device type other than CUDA, before its first use.
void register_device_kernels(c10::DeviceType type, const DeviceKernels& kernels);

/// Our CUDA kernels; all null if CUDA is not loaded, see cuda_libraries.h.
DeviceKernels cuda_kernels();

}  // namespace lockstep::kernels
