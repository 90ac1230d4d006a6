#pragma once

// Internal: bf16 and fp16 to and from fp32, as bits. No libtorch here, see adamw_loop.h.

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

/// The value of bf16 or fp16 bits.
inline float widen_bf16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }
inline float widen_fp16(uint16_t bits) {
  constexpr float kExponentShift = 0x1p112F;  // between the exponents' biases, 127 - 15
  const uint32_t magnitude = (uint32_t{bits} & 0x7FFF) << 13;
  const uint32_t sign = (uint32_t{bits} & 0x8000) << 16;
  const float finite = std::bit_cast<float>(magnitude) * kExponentShift;
  const bool special = magnitude >= 0x0F800000;  // infinite or NaN
  const uint32_t wide = special ? magnitude | 0x7F800000 : std::bit_cast<uint32_t>(finite);
  return std::bit_cast<float>(wide | sign);
}

/// The fp16 bits of one value, rounded to nearest even; infinite from 65520 on.
inline uint16_t round_to_fp16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  const uint32_t normal = ((magnitude + 0xFFF + ((magnitude >> 13) & 1)) >> 13) - (112U << 10);
  // Added to 1/2, whose last place is 2^-24 like that of every subnormal fp16.
  const uint32_t subnormal =
      std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) - 0x3F000000;
  uint32_t half = magnitude < 0x38800000 ? subnormal : normal;  // below 2^-14
  half = magnitude >= 0x47800000 ? 0x7C00 : half;               // 2^16 and more
  half = magnitude > 0x7F800000 ? 0x7E00 : half;
  return static_cast<uint16_t>(half | ((bits >> 16) & 0x8000));
}

/// The values of `n` bf16 or fp16 numbers.
void widen_bf16_loop(const uint16_t* from, float* to, int64_t n);
void widen_fp16_loop(const uint16_t* from, float* to, int64_t n);

/// The bits of `n` values, rounded to nearest even. fp16 becomes infinite from 65520 on.
void round_to_bf16_loop(const float* from, uint16_t* to, int64_t n);
void round_to_fp16_loop(const float* from, uint16_t* to, int64_t n);

}  // namespace lockstep::kernels
