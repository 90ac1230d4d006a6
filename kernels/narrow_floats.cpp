#include "lockstep/kernels/narrow_floats.h"

#include "lockstep/core/vector_clones.h"

namespace lockstep::kernels {

LOCKSTEP_VECTOR_CLONES
void widen_bf16_loop(const uint16_t* __restrict from, float* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = widen_bf16(from[i]);
}

LOCKSTEP_VECTOR_CLONES
void round_to_bf16_loop(const float* __restrict from, uint16_t* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = round_to_bf16(from[i]);
}

LOCKSTEP_VECTOR_CLONES
void widen_fp16_loop(const uint16_t* __restrict from, float* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = widen_fp16(from[i]);
}

LOCKSTEP_VECTOR_CLONES
void round_to_fp16_loop(const float* __restrict from, uint16_t* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = round_to_fp16(from[i]);
}

}  // namespace lockstep::kernels
