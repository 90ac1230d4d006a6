#include "lockstep/training/crc32c.h"

#include <array>

namespace lockstep {
namespace {

constexpr std::array<uint32_t, 256> make_castagnoli_table() {
  constexpr uint32_t kPolynomial = 0x82F63B78;
  std::array<uint32_t, 256> table = {};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) != 0 ? kPolynomial : 0);
    table[byte] = value;
  }
  return table;
}

constexpr std::array<uint32_t, 256> kCastagnoli = make_castagnoli_table();

}  // namespace

uint32_t crc32c(std::string_view bytes) {
  uint32_t value = ~uint32_t{0};
  for (const char c : bytes)
    value = (value >> 8) ^ kCastagnoli[(value ^ static_cast<unsigned char>(c)) & 0xFF];
  return ~value;
}

}  // namespace lockstep
