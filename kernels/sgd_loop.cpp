#include "lockstep/kernels/sgd_loop.h"

#include "lockstep/core/vector_clones.h"

namespace lockstep::kernels {
namespace {

template <class T>
inline __attribute__((always_inline)) void run(T* __restrict p, const T* __restrict g,
                                               T* __restrict b, int64_t n, const SgdScalars& s) {
  const auto scale = static_cast<T>(s.grad_scale), rate = static_cast<T>(s.learning_rate);
  const auto decay = static_cast<T>(s.weight_decay);
  const auto momentum = static_cast<T>(s.momentum);
  if (!b) {
    for (int64_t i = 0; i < n; ++i) p[i] -= rate * (g[i] * scale + p[i] * decay);
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    b[i] = b[i] * momentum + (g[i] * scale + p[i] * decay);
    p[i] -= rate * b[i];
  }
}

}  // namespace

LOCKSTEP_VECTOR_CLONES
void sgd_loop(float* p, const float* g, float* b, int64_t n, const SgdScalars& scalars) {
  run(p, g, b, n, scalars);
}

LOCKSTEP_VECTOR_CLONES
void sgd_loop(double* p, const double* g, double* b, int64_t n, const SgdScalars& scalars) {
  run(p, g, b, n, scalars);
}

}  // namespace lockstep::kernels
