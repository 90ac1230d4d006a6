#pragma once

// Internal: the CPU loops of rotary embedding, without libtorch; see adamw_loop.h.

#include <cstdint>

#include "lockstep/kernels/rotary_body.h"

namespace lockstep::kernels {

/// Rows `first` to `end` of sequence * batch; `backward` means the same as kBackward of
/// rotary_slot().
void rotary_loop(bool backward, const RotaryHeads<float>& a, int64_t first, int64_t end);
void rotary_loop(bool backward, const RotaryHeads<double>& a, int64_t first, int64_t end);
void rotary_loop(bool backward, const RotaryHeads<Bf16>& a, int64_t first, int64_t end);
void rotary_loop(bool backward, const RotaryHeads<Fp16>& a, int64_t first, int64_t end);

}  // namespace lockstep::kernels
