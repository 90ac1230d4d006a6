#include "lockstep/kernels/swiglu_loop.h"

#include "lockstep/core/vector_clones.h"
#include "lockstep/kernels/swiglu_body.h"
#include "lockstep/kernels/vector_block.h"

namespace lockstep::kernels {
namespace {

template <class T>
LOCKSTEP_LANE void run_swiglu(const T* inner, T* result, int64_t rows, int64_t width) {
  for (int64_t row = 0; row < rows; ++row, inner += 2 * width, result += width)
    swiglu_row(VectorBlock{}, inner, inner + width, result, width);
}

template <class T>
LOCKSTEP_LANE void run_swiglu_gradient(const T* grad, const T* inner, T* of_inner, int64_t rows,
                                       int64_t width) {
  for (int64_t row = 0; row < rows; ++row, inner += 2 * width, of_inner += 2 * width, grad += width)
    swiglu_gradient_row(VectorBlock{}, grad, inner, inner + width, of_inner, of_inner + width,
                        width);
}

}  // namespace

LOCKSTEP_FMA_CLONES
void swiglu_loop(const float* inner, float* result, int64_t rows, int64_t width) {
  run_swiglu(inner, result, rows, width);
}

LOCKSTEP_FMA_CLONES
void swiglu_loop(const double* inner, double* result, int64_t rows, int64_t width) {
  run_swiglu(inner, result, rows, width);
}

LOCKSTEP_FMA_CLONES
void swiglu_loop(const Bf16* inner, Bf16* result, int64_t rows, int64_t width) {
  run_swiglu(inner, result, rows, width);
}

LOCKSTEP_FMA_CLONES
void swiglu_loop(const Fp16* inner, Fp16* result, int64_t rows, int64_t width) {
  run_swiglu(inner, result, rows, width);
}

LOCKSTEP_FMA_CLONES
void swiglu_gradient_loop(const float* grad, const float* inner, float* of_inner, int64_t rows,
                          int64_t width) {
  run_swiglu_gradient(grad, inner, of_inner, rows, width);
}

LOCKSTEP_FMA_CLONES
void swiglu_gradient_loop(const double* grad, const double* inner, double* of_inner, int64_t rows,
                          int64_t width) {
  run_swiglu_gradient(grad, inner, of_inner, rows, width);
}

LOCKSTEP_FMA_CLONES
void swiglu_gradient_loop(const Bf16* grad, const Bf16* inner, Bf16* of_inner, int64_t rows,
                          int64_t width) {
  run_swiglu_gradient(grad, inner, of_inner, rows, width);
}

LOCKSTEP_FMA_CLONES
void swiglu_gradient_loop(const Fp16* grad, const Fp16* inner, Fp16* of_inner, int64_t rows,
                          int64_t width) {
  run_swiglu_gradient(grad, inner, of_inner, rows, width);
}

}  // namespace lockstep::kernels
