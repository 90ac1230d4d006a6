#include "lockstep/kernels/cross_entropy_loop.h"

#include "lockstep/core/vector_clones.h"
#include "lockstep/kernels/cross_entropy_body.h"
#include "lockstep/kernels/vector_block.h"

namespace lockstep::kernels {
namespace {

template <class T>
LOCKSTEP_LANE void run_cross_entropy(bool smoothed, const CrossEntropyRows<T>& a, int64_t first,
                                     int64_t end) {
  if (smoothed) return cross_entropy_rows<true>(VectorBlock{}, a, first, end);
  cross_entropy_rows<false>(VectorBlock{}, a, first, end);
}

template <class W>
LOCKSTEP_LANE void run_losses(const CrossEntropyLosses<W>& a, int64_t first, int64_t end) {
  if (a.share > 0) return cross_entropy_losses<true>(VectorBlock{}, a, first, end - first);
  cross_entropy_losses<false>(VectorBlock{}, a, first, end - first);
}

}  // namespace

LOCKSTEP_FMA_CLONES
void cross_entropy_loop(bool smoothed, const CrossEntropyRows<float>& a, int64_t first,
                        int64_t end) {
  run_cross_entropy(smoothed, a, first, end);
}

LOCKSTEP_FMA_CLONES
void cross_entropy_loop(bool smoothed, const CrossEntropyRows<double>& a, int64_t first,
                        int64_t end) {
  run_cross_entropy(smoothed, a, first, end);
}

LOCKSTEP_FMA_CLONES
void cross_entropy_loop(bool smoothed, const CrossEntropyRows<Bf16>& a, int64_t first,
                        int64_t end) {
  run_cross_entropy(smoothed, a, first, end);
}

LOCKSTEP_FMA_CLONES
void cross_entropy_loop(bool smoothed, const CrossEntropyRows<Fp16>& a, int64_t first,
                        int64_t end) {
  run_cross_entropy(smoothed, a, first, end);
}

void cross_entropy_losses_loop(const CrossEntropyLosses<float>& a, int64_t first, int64_t end) {
  run_losses(a, first, end);
}

void cross_entropy_losses_loop(const CrossEntropyLosses<double>& a, int64_t first, int64_t end) {
  run_losses(a, first, end);
}

LOCKSTEP_FMA_CLONES
void cross_entropy_gradient_loop(const CrossEntropyGradientRows<float>& a, int64_t first,
                                 int64_t end) {
  cross_entropy_gradient_rows(VectorBlock{}, a, first, end);
}

LOCKSTEP_FMA_CLONES
void cross_entropy_gradient_loop(const CrossEntropyGradientRows<double>& a, int64_t first,
                                 int64_t end) {
  cross_entropy_gradient_rows(VectorBlock{}, a, first, end);
}

LOCKSTEP_FMA_CLONES
void cross_entropy_gradient_loop(const CrossEntropyGradientRows<Bf16>& a, int64_t first,
                                 int64_t end) {
  cross_entropy_gradient_rows(VectorBlock{}, a, first, end);
}

LOCKSTEP_FMA_CLONES
void cross_entropy_gradient_loop(const CrossEntropyGradientRows<Fp16>& a, int64_t first,
                                 int64_t end) {
  cross_entropy_gradient_rows(VectorBlock{}, a, first, end);
}

}  // namespace lockstep::kernels
