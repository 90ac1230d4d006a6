#include "lockstep/datasets/crc32.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lockstep {
namespace {

constexpr uint32_t kPolynomial = 0xEDB88320;
constexpr size_t kStride = 8;  // bytes at once

/// Entry [k][b]: the checksum of byte b with k zero bytes after it.
using Tables = std::array<std::array<uint32_t, 256>, kStride>;

constexpr uint32_t times_x(uint32_t value) {
  return (value >> 1) ^ ((value & 1) != 0 ? kPolynomial : 0);
}

constexpr Tables make_tables() {
  Tables tables = {};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = times_x(value);
    tables[0][byte] = value;
  }
  for (size_t k = 1; k < kStride; ++k)
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t value = tables[k - 1][byte];
      tables[k][byte] = (value >> 8) ^ tables[0][value & 0xFF];
    }
  return tables;
}

constexpr Tables kTables = make_tables();

/// Continues from the register `value`.
uint32_t by_tables(std::string_view bytes, uint32_t value) {
  for (; bytes.size() >= kStride; bytes.remove_prefix(kStride)) {
    uint64_t word = 0;
    std::memcpy(&word, bytes.data(), sizeof word);
    word ^= value;
    value = 0;
    for (size_t i = 0; i < kStride; ++i)
      value ^= kTables[kStride - 1 - i][static_cast<size_t>(word >> (8 * i)) & 0xFF];
  }
  for (const char c : bytes)
    value = (value >> 8) ^ kTables[0][(value ^ static_cast<unsigned char>(c)) & 0xFF];
  return value;
}

#if defined(__x86_64__)

constexpr size_t kLane = 16, kLanes = 4;

/// x^exponent modulo the polynomial, in the bit order of the carry-less product.
constexpr int64_t power_of_x(int exponent) {
  uint32_t value = 0x80000000;
  for (int i = 0; i < exponent; ++i) value = times_x(value);
  return static_cast<int64_t>(value) << 1;
}

/// Moves a lane `bits` further: returns its value there, again in 128 bits.
template <int bits>
__attribute__((target("pclmul,sse4.1"))) inline __m128i moved(__m128i lane) {
  const __m128i powers = _mm_set_epi64x(power_of_x(bits - 32), power_of_x(bits + 32));
  return _mm_xor_si128(_mm_clmulepi64_si128(lane, powers, 0x00),
                       _mm_clmulepi64_si128(lane, powers, 0x11));
}

__attribute__((target("pclmul,sse4.1"))) inline __m128i lane_at(const char* bytes) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
}

/// For at least kLane * kLanes bytes, by carry-less products (V. Gopal et al., Fast CRC computation
/// for generic polynomials using PCLMULQDQ instruction, 2009): four lanes run over the bytes and
/// are folded into 16 bytes that have the same checksum.
__attribute__((target("pclmul,sse4.1"))) uint32_t by_products(std::string_view bytes,
                                                              uint32_t value) {
  __m128i lanes[kLanes];
  for (size_t i = 0; i < kLanes; ++i) lanes[i] = lane_at(bytes.data() + i * kLane);
  lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(static_cast<int>(value)));
  bytes.remove_prefix(kLanes * kLane);
  for (; bytes.size() >= kLanes * kLane; bytes.remove_prefix(kLanes * kLane))
    for (size_t i = 0; i < kLanes; ++i)
      lanes[i] =
          _mm_xor_si128(moved<kLanes * kLane * 8>(lanes[i]), lane_at(bytes.data() + i * kLane));
  __m128i last = lanes[0];
  for (size_t i = 1; i < kLanes; ++i) last = _mm_xor_si128(moved<kLane * 8>(last), lanes[i]);
  std::array<char, kLane> rest;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(rest.data()), last);
  return by_tables(bytes, by_tables({rest.data(), rest.size()}, 0));
}

#endif

}  // namespace

uint32_t crc32(std::string_view bytes, uint32_t before) {
#if defined(__x86_64__)
  static const bool products =
      __builtin_cpu_supports("pclmul") != 0 && __builtin_cpu_supports("sse4.1") != 0;
  if (products && bytes.size() >= kLanes * kLane) return ~by_products(bytes, ~before);
#endif
  return ~by_tables(bytes, ~before);
}

}  // namespace lockstep
