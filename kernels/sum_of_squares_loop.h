#pragma once

// Internal: the CPU loops, without libtorch; see adamw_loop.h.

#include <cstdint>

namespace lockstep::kernels {

double sum_of_squares_loop(const float* x, int64_t n);
double sum_of_squares_loop(const double* x, int64_t n);
/// bf16 bits.
double sum_of_squares_loop(const uint16_t* x, int64_t n);

}  // namespace lockstep::kernels
