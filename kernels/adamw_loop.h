#pragma once

// Internal: the CPU loop of AdamW. No libtorch here: next to its headers the loop, once inlined,
// lost its vectorization.

#include <cstdint>

#include "lockstep/kernels/adamw_scalars.h"

namespace lockstep::kernels {

void adamw_loop(float* p, const float* g, float* m, float* v, int64_t n,
                const AdamWScalars& scalars);
/// `low` gets the weights in bf16, rounded to nearest even.
void adamw_loop(float* p, const float* g, float* m, float* v, uint16_t* low, int64_t n,
                const AdamWScalars& scalars);
void adamw_loop(double* p, const double* g, double* m, double* v, int64_t n,
                const AdamWScalars& scalars);

}  // namespace lockstep::kernels
