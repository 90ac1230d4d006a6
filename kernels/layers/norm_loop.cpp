#include "lockstep/kernels/norm_loop.h"

#include "lockstep/core/vector_clones.h"
#include "lockstep/kernels/norm_body.h"
#include "lockstep/kernels/vector_block.h"

namespace lockstep::kernels {
namespace {

template <class T>
LOCKSTEP_LANE void run_norm(bool centred, const NormRows<T>& a, int64_t first, int64_t end) {
  if (centred) return norm_rows<true>(VectorBlock{}, a, first, end);
  norm_rows<false>(VectorBlock{}, a, first, end);
}

template <class T>
LOCKSTEP_LANE void run_norm_gradient(bool centred, const NormGradientRows<T>& a, int64_t first,
                                     int64_t end, Wide<T>* of_weight, Wide<T>* of_bias) {
  if (centred) return norm_gradient_rows<true>(VectorBlock{}, a, first, end, of_weight, of_bias);
  norm_gradient_rows<false>(VectorBlock{}, a, first, end, of_weight, of_bias);
}

template <class T>
LOCKSTEP_LANE void run_sum(T* rows, int64_t num_rows, int64_t width, T* total) {
  const auto add = [](T one, T other) LOCKSTEP_LANE_LAMBDA { return one + other; };
  for (int64_t step = 1; step < num_rows; step *= 2)
    for (int64_t row = 0; row + step < num_rows; row += 2 * step)
      VectorBlock::map(width, add, rows + row * width, rows + row * width,
                       rows + (row + step) * width);
  VectorBlock::copy(width, total, rows);
}

}  // namespace

LOCKSTEP_VECTOR_CLONES
void norm_loop(bool centred, const NormRows<float>& a, int64_t first, int64_t end) {
  run_norm(centred, a, first, end);
}

LOCKSTEP_VECTOR_CLONES
void norm_loop(bool centred, const NormRows<double>& a, int64_t first, int64_t end) {
  run_norm(centred, a, first, end);
}

LOCKSTEP_VECTOR_CLONES
void norm_loop(bool centred, const NormRows<Bf16>& a, int64_t first, int64_t end) {
  run_norm(centred, a, first, end);
}

LOCKSTEP_VECTOR_CLONES
void norm_loop(bool centred, const NormRows<Fp16>& a, int64_t first, int64_t end) {
  run_norm(centred, a, first, end);
}

LOCKSTEP_VECTOR_CLONES
void norm_gradient_loop(bool centred, const NormGradientRows<float>& a, int64_t first, int64_t end,
                        float* of_weight, float* of_bias) {
  run_norm_gradient(centred, a, first, end, of_weight, of_bias);
}

LOCKSTEP_VECTOR_CLONES
void norm_gradient_loop(bool centred, const NormGradientRows<double>& a, int64_t first, int64_t end,
                        double* of_weight, double* of_bias) {
  run_norm_gradient(centred, a, first, end, of_weight, of_bias);
}

LOCKSTEP_VECTOR_CLONES
void norm_gradient_loop(bool centred, const NormGradientRows<Bf16>& a, int64_t first, int64_t end,
                        float* of_weight, float* of_bias) {
  run_norm_gradient(centred, a, first, end, of_weight, of_bias);
}

LOCKSTEP_VECTOR_CLONES
void norm_gradient_loop(bool centred, const NormGradientRows<Fp16>& a, int64_t first, int64_t end,
                        float* of_weight, float* of_bias) {
  run_norm_gradient(centred, a, first, end, of_weight, of_bias);
}

LOCKSTEP_VECTOR_CLONES
void sum_rows(float* rows, int64_t num_rows, int64_t width, float* total) {
  run_sum(rows, num_rows, width, total);
}

LOCKSTEP_VECTOR_CLONES
void sum_rows(double* rows, int64_t num_rows, int64_t width, double* total) {
  run_sum(rows, num_rows, width, total);
}

}  // namespace lockstep::kernels
