#pragma once

// Internal: the CPU loops of SwiGLU, without libtorch; see adamw_loop.h.

#include <cstdint>

#include "lockstep/kernels/float_storage.h"

namespace lockstep::kernels {

/// `inner` [rows, 2 * width] -> `result` [rows, width]
void swiglu_loop(const float* inner, float* result, int64_t rows, int64_t width);
void swiglu_loop(const double* inner, double* result, int64_t rows, int64_t width);
void swiglu_loop(const Bf16* inner, Bf16* result, int64_t rows, int64_t width);
void swiglu_loop(const Fp16* inner, Fp16* result, int64_t rows, int64_t width);

/// `grad` [rows, width] -> `of_inner` [rows, 2 * width]
void swiglu_gradient_loop(const float* grad, const float* inner, float* of_inner, int64_t rows,
                          int64_t width);
void swiglu_gradient_loop(const double* grad, const double* inner, double* of_inner, int64_t rows,
                          int64_t width);
void swiglu_gradient_loop(const Bf16* grad, const Bf16* inner, Bf16* of_inner, int64_t rows,
                          int64_t width);
void swiglu_gradient_loop(const Fp16* grad, const Fp16* inner, Fp16* of_inner, int64_t rows,
                          int64_t width);

}  // namespace lockstep::kernels
