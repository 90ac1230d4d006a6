#pragma once

// Internal: the operands of norm_body.h.

#include <cmath>
#include <cstdint>

#include "lockstep/kernels/float_storage.h"

namespace lockstep::kernels {

/// Tensors [rows, width] and [rows], see NormTensors; `residual` and `sum` may be null.
template <class T>
struct NormRows {
  const T *x, *residual;
  const Wide<T>*weight, *bias;
  T *sum, *normalized;
  Wide<T>*mean, *root;
  int64_t width;
  double epsilon;
};

/// The same for NormGradientTensors; `sum_grad` may be null.
template <class T>
struct NormGradientRows {
  const T *grad, *sum_grad, *source;
  const Wide<T>*mean, *root, *weight;
  T* input_grad;
  int64_t width;
};

#ifdef __CUDACC__
LOCKSTEP_LANE float lane_sqrt(float x) { return sqrtf(x); }
LOCKSTEP_LANE double lane_sqrt(double x) { return ::sqrt(x); }
#else
template <class T>
LOCKSTEP_LANE T lane_sqrt(T x) {
  return std::sqrt(x);
}
#endif

}  // namespace lockstep::kernels
