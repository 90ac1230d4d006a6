#pragma once

// Internal: the operands of the kernels of to_fp8_matrices().

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace lockstep::kernels {

struct Fp8Tensors {
  at::Tensor x;           ///< [rows, width], contiguous
  at::Tensor scale;       ///< fp32 [1, 1]; or [rows, 1] for values, [width, 1] for transposed only
  at::Tensor largest;     ///< fp32 [1, 1], updated to the maximum; may be undefined
  at::Tensor values;      ///< [rows, width] of 8 bits; may be undefined
  at::Tensor transposed;  ///< [width, rows] of the same; may be undefined
};

/// Computes them with libtorch's operators, on any device.
void to_fp8_by_operators(const Fp8Tensors& tensors);

}  // namespace lockstep::kernels
