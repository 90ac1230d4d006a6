#pragma once

// Internal: the CPU loops of norms, without libtorch; see adamw_loop.h.

#include <cstdint>

#include "lockstep/kernels/norm_rows.h"

namespace lockstep::kernels {

/// Rows `first` to `end` of LayerNorm if `centred`, otherwise of RMSNorm.
void norm_loop(bool centred, const NormRows<float>& a, int64_t first, int64_t end);
void norm_loop(bool centred, const NormRows<double>& a, int64_t first, int64_t end);
void norm_loop(bool centred, const NormRows<Bf16>& a, int64_t first, int64_t end);
void norm_loop(bool centred, const NormRows<Fp16>& a, int64_t first, int64_t end);

/// Their backward, see norm_gradient_rows().
void norm_gradient_loop(bool centred, const NormGradientRows<float>& a, int64_t first, int64_t end,
                        float* of_weight, float* of_bias);
void norm_gradient_loop(bool centred, const NormGradientRows<double>& a, int64_t first, int64_t end,
                        double* of_weight, double* of_bias);
void norm_gradient_loop(bool centred, const NormGradientRows<Bf16>& a, int64_t first, int64_t end,
                        float* of_weight, float* of_bias);
void norm_gradient_loop(bool centred, const NormGradientRows<Fp16>& a, int64_t first, int64_t end,
                        float* of_weight, float* of_bias);

/// total [width] becomes the sum over the rows [num_rows, width], at least one, which serve as
/// memory for sums of 2, 4, 8 ... rows.
void sum_rows(float* rows, int64_t num_rows, int64_t width, float* total);
void sum_rows(double* rows, int64_t num_rows, int64_t width, double* total);

}  // namespace lockstep::kernels
