#pragma once

// Internal: bf16 and fp16 from and to fp32, as bits. No libtorch here, see adamw_loop.h.

#include <cstdint>

namespace lockstep::kernels {

/// The values of `n` bf16 or fp16 numbers.
void widen_bf16_loop(const uint16_t* from, float* to, int64_t n);
void widen_fp16_loop(const uint16_t* from, float* to, int64_t n);

/// The bits of `n` values, rounded to nearest even. fp16 becomes infinite from 65520 on.
void round_to_bf16_loop(const float* from, uint16_t* to, int64_t n);
void round_to_fp16_loop(const float* from, uint16_t* to, int64_t n);

}  // namespace lockstep::kernels
