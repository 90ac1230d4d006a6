#include "lockstep/kernels/rotary_loop.h"

#include "lockstep/core/vector_clones.h"
#include "lockstep/kernels/vector_block.h"

namespace lockstep::kernels {
namespace {

template <bool kBackward, class T>
LOCKSTEP_LANE void run_rotary_rows(const RotaryHeads<T>& a, int64_t first, int64_t end) {
  const auto slots = static_cast<int32_t>(a.slots());
  for (int64_t row = first; row < end; ++row)
    for (int32_t slot = 0; slot < slots; ++slot)
      rotary_slot<kBackward>(VectorBlock{}, a, row / a.batch, row % a.batch, slot);
}

template <class T>
LOCKSTEP_LANE void run_rotary(bool backward, const RotaryHeads<T>& a, int64_t first, int64_t end) {
  if (backward) return run_rotary_rows<true>(a, first, end);
  run_rotary_rows<false>(a, first, end);
}

}  // namespace

LOCKSTEP_VECTOR_CLONES
void rotary_loop(bool backward, const RotaryHeads<float>& a, int64_t first, int64_t end) {
  run_rotary(backward, a, first, end);
}

LOCKSTEP_VECTOR_CLONES
void rotary_loop(bool backward, const RotaryHeads<double>& a, int64_t first, int64_t end) {
  run_rotary(backward, a, first, end);
}

LOCKSTEP_VECTOR_CLONES
void rotary_loop(bool backward, const RotaryHeads<Bf16>& a, int64_t first, int64_t end) {
  run_rotary(backward, a, first, end);
}

LOCKSTEP_VECTOR_CLONES
void rotary_loop(bool backward, const RotaryHeads<Fp16>& a, int64_t first, int64_t end) {
  run_rotary(backward, a, first, end);
}

}  // namespace lockstep::kernels
