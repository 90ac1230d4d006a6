#include "lockstep/kernels/narrow_floats.h"

#include "lockstep/core/vector_clones.h"

namespace lockstep::kernels {
namespace {

constexpr uint32_t kMagnitude = 0x7FFFFFFF;
constexpr uint32_t kFloatInfinity = 0x7F800000;
constexpr float kExponentShift = 0x1p112F;            // between the exponents' biases, 127 - 15
constexpr uint32_t kSmallestNormalHalf = 0x38800000;  // 2^-14
constexpr uint32_t kHalfInfinity = 0x47800000;        // 2^16

}  // namespace

LOCKSTEP_VECTOR_CLONES
void widen_bf16_loop(const uint16_t* __restrict from, float* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = std::bit_cast<float>(uint32_t{from[i]} << 16);
}

LOCKSTEP_VECTOR_CLONES
void round_to_bf16_loop(const float* __restrict from, uint16_t* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = round_to_bf16(from[i]);
}

LOCKSTEP_VECTOR_CLONES
void widen_fp16_loop(const uint16_t* __restrict from, float* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t magnitude = (uint32_t{from[i]} & 0x7FFF) << 13;
    const uint32_t sign = (uint32_t{from[i]} & 0x8000) << 16;
    const float finite = std::bit_cast<float>(magnitude) * kExponentShift;
    const bool special = magnitude >= 0x0F800000;  // infinite or NaN
    const uint32_t bits = special ? magnitude | kFloatInfinity : std::bit_cast<uint32_t>(finite);
    to[i] = std::bit_cast<float>(bits | sign);
  }
}

LOCKSTEP_VECTOR_CLONES
void round_to_fp16_loop(const float* __restrict from, uint16_t* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const auto bits = std::bit_cast<uint32_t>(from[i]);
    const uint32_t magnitude = bits & kMagnitude;
    const uint32_t normal = ((magnitude + 0xFFF + ((magnitude >> 13) & 1)) >> 13) - (112U << 10);
    // Added to 1/2, whose last place is 2^-24 like that of every subnormal fp16.
    const uint32_t subnormal =
        std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) - 0x3F000000;
    uint32_t half = magnitude < kSmallestNormalHalf ? subnormal : normal;
    half = magnitude >= kHalfInfinity ? 0x7C00 : half;
    half = magnitude > kFloatInfinity ? 0x7E00 : half;
    to[i] = static_cast<uint16_t>(half | ((bits >> 16) & 0x8000));
  }
}

}  // namespace lockstep::kernels
