#pragma once

// Internal: the CPU loop of SGD, without libtorch; see adamw_loop.h.

#include <cstdint>

#include "lockstep/kernels/sgd_scalars.h"

namespace lockstep::kernels {

/// `b` may be null; then there is no momentum.
void sgd_loop(float* p, const float* g, float* b, int64_t n, const SgdScalars& scalars);
void sgd_loop(double* p, const double* g, double* b, int64_t n, const SgdScalars& scalars);

}  // namespace lockstep::kernels
