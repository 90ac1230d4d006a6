#include "lockstep/kernels/adamw_loop.h"

#include <cmath>

#include "lockstep/core/vector_clones.h"
#include "lockstep/kernels/narrow_floats.h"

namespace lockstep::kernels {
namespace {

template <class T>
struct Coefficients {
  explicit Coefficients(const AdamWScalars& s)
      : decay(static_cast<T>(1 - s.learning_rate * s.weight_decay)),
        grad_scale(static_cast<T>(s.grad_scale)),
        beta1(static_cast<T>(s.beta1)),
        beta2(static_cast<T>(s.beta2)),
        one_minus_beta1(static_cast<T>(1 - s.beta1)),
        one_minus_beta2(static_cast<T>(1 - s.beta2)),
        eps(static_cast<T>(s.eps)),
        inverse_root2(static_cast<T>(1 / std::sqrt(s.bias_correction2))),
        step_size(static_cast<T>(s.learning_rate / s.bias_correction1)) {}

  T decay, grad_scale, beta1, beta2, one_minus_beta1, one_minus_beta2, eps, inverse_root2,
      step_size;
};

// In elements. The hardware keeps too few reads under way, and none across pages, so memory is
// prefetched early, and into the nearest cache shortly before its use.
constexpr int64_t kFar = 1024, kNear = 128;
constexpr int64_t kStep = 16;  // at least one cache line of each operand

template <class T>
inline __attribute__((always_inline)) void fetch(const T* operand) {
  __builtin_prefetch(operand + kFar, /*rw=*/0, /*locality=*/2);
  __builtin_prefetch(operand + kNear);
}

/// `low` gets the weights in bf16, or is null.
template <bool kCopies, class T>
inline __attribute__((always_inline)) void run(T* __restrict p, const T* __restrict g,
                                               T* __restrict m, T* __restrict v,
                                               uint16_t* __restrict low, int64_t n,
                                               const Coefficients<T>& c) {
  const auto update = [&](int64_t i) __attribute__((always_inline)) {
    const T grad = g[i] * c.grad_scale;
    const T mean = m[i] * c.beta1 + grad * c.one_minus_beta1;
    const T square = v[i] * c.beta2 + grad * grad * c.one_minus_beta2;
    m[i] = mean;
    v[i] = square;
    p[i] = p[i] * c.decay - c.step_size * mean / (std::sqrt(square) * c.inverse_root2 + c.eps);
    if constexpr (kCopies) low[i] = round_to_bf16(p[i]);
  };
  const int64_t whole = n - n % kStep;
  for (int64_t block = 0; block < whole; block += kStep) {
    fetch(p + block);
    fetch(g + block);
    fetch(m + block);
    fetch(v + block);
    if constexpr (kCopies) __builtin_prefetch(low + block + kNear, /*rw=*/1);
    for (int64_t i = block; i < block + kStep; ++i) update(i);
  }
  for (int64_t i = whole; i < n; ++i) update(i);
}

}  // namespace

LOCKSTEP_VECTOR_CLONES
void adamw_loop(float* p, const float* g, float* m, float* v, int64_t n,
                const AdamWScalars& scalars) {
  const Coefficients<float> c(scalars);
  run<false>(p, g, m, v, nullptr, n, c);
}

LOCKSTEP_VECTOR_CLONES
void adamw_loop(float* p, const float* g, float* m, float* v, uint16_t* low, int64_t n,
                const AdamWScalars& scalars) {
  const Coefficients<float> c(scalars);
  run<true>(p, g, m, v, low, n, c);
}

LOCKSTEP_VECTOR_CLONES
void adamw_loop(double* p, const double* g, double* m, double* v, int64_t n,
                const AdamWScalars& scalars) {
  const Coefficients<double> c(scalars);
  run<false>(p, g, m, v, nullptr, n, c);
}

}  // namespace lockstep::kernels
