#pragma once

// Internal: bf16 and fp16 from and to fp32, as bits. No libtorch here, see adamw_loop.h.

#include <bit>
#include <cstdint>

namespace lockstep::kernels {

/// The bits of one value, rounded to nearest even.
inline uint16_t round_to_bf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  const bool nan = (bits & 0x7FFFFFFF) > 0x7F800000;
  return static_cast<uint16_t>(nan ? 0x7FC0 : rounded);
}

/// The values of `n` bf16 or fp16 numbers.
void widen_bf16_loop(const uint16_t* from, float* to, int64_t n);
void widen_fp16_loop(const uint16_t* from, float* to, int64_t n);

/// The bits of `n` values, rounded to nearest even. fp16 becomes infinite from 65520 on.
void round_to_bf16_loop(const float* from, uint16_t* to, int64_t n);
void round_to_fp16_loop(const float* from, uint16_t* to, int64_t n);

}  // namespace lockstep::kernels
