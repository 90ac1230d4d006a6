#include "lockstep/kernels/adamw_loop.h"

#include <cmath>

#include "lockstep/core/vector_clones.h"

namespace lockstep::kernels {
namespace {

template <class T>
struct Coefficients {
  Coefficients(const AdamWScalars& s, bool weight_decay)
      : decay(static_cast<T>(weight_decay ? 1 - s.learning_rate * s.weight_decay : 1)),
        grad_scale(static_cast<T>(s.grad_scale)),
        beta1(static_cast<T>(s.beta1)),
        beta2(static_cast<T>(s.beta2)),
        one_minus_beta1(static_cast<T>(1 - s.beta1)),
        one_minus_beta2(static_cast<T>(1 - s.beta2)),
        eps(static_cast<T>(s.eps)),
        root_correction2(static_cast<T>(std::sqrt(s.bias_correction2))),
        step_size(static_cast<T>(s.learning_rate / s.bias_correction1)) {}

  T decay, grad_scale, beta1, beta2, one_minus_beta1, one_minus_beta2, eps, root_correction2,
      step_size;
};

template <class T>
inline __attribute__((always_inline)) void run(T* __restrict p, const T* __restrict g,
                                               T* __restrict m, T* __restrict v, int64_t n,
                                               const Coefficients<T>& c) {
  for (int64_t i = 0; i < n; ++i) {
    const T grad = g[i] * c.grad_scale;
    const T mean = m[i] * c.beta1 + grad * c.one_minus_beta1;
    const T square = v[i] * c.beta2 + grad * grad * c.one_minus_beta2;
    m[i] = mean;
    v[i] = square;
    p[i] = p[i] * c.decay - c.step_size * mean / (std::sqrt(square) / c.root_correction2 + c.eps);
  }
}

}  // namespace

LOCKSTEP_VECTOR_CLONES
void adamw_loop(float* p, const float* g, float* m, float* v, int64_t n,
                const AdamWScalars& scalars, bool weight_decay) {
  const Coefficients<float> c(scalars, weight_decay);
  run(p, g, m, v, n, c);
}

LOCKSTEP_VECTOR_CLONES
void adamw_loop(double* p, const double* g, double* m, double* v, int64_t n,
                const AdamWScalars& scalars, bool weight_decay) {
  const Coefficients<double> c(scalars, weight_decay);
  run(p, g, m, v, n, c);
}

}  // namespace lockstep::kernels
