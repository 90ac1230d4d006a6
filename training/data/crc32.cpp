#include "lockstep/training/data/crc32.h"

#include <array>
#include <cstring>

namespace lockstep {
namespace {

constexpr uint32_t kPolynomial = 0xEDB88320;
constexpr size_t kStep = 8;  // bytes at once

/// Entry [k][b]: the checksum of byte b with k zero bytes after it.
using Tables = std::array<std::array<uint32_t, 256>, kStep>;

constexpr Tables make_tables() {
  Tables tables = {};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) != 0 ? kPolynomial : 0);
    tables[0][byte] = value;
  }
  for (size_t k = 1; k < kStep; ++k)
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t value = tables[k - 1][byte];
      tables[k][byte] = (value >> 8) ^ tables[0][value & 0xFF];
    }
  return tables;
}

constexpr Tables kTables = make_tables();

}  // namespace

uint32_t crc32(std::string_view bytes, uint32_t before) {
  uint32_t value = ~before;
  for (; bytes.size() >= kStep; bytes.remove_prefix(kStep)) {
    uint64_t word = 0;
    std::memcpy(&word, bytes.data(), sizeof word);
    word ^= value;
    value = 0;
    for (size_t i = 0; i < kStep; ++i)
      value ^= kTables[kStep - 1 - i][static_cast<size_t>(word >> (8 * i)) & 0xFF];
  }
  for (const char c : bytes)
    value = (value >> 8) ^ kTables[0][(value ^ static_cast<unsigned char>(c)) & 0xFF];
  return ~value;
}

}  // namespace lockstep
