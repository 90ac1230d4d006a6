#include "lockstep/datasets/byte_alphabet.h"

#include <array>
#include <cstdint>

#include "lockstep/datasets/utf8.h"

namespace lockstep {
namespace {

struct ByteAlphabet {
  std::array<uint32_t, 256> points;  ///< by byte
  std::array<int16_t, 324> bytes;    ///< by code point, or -1
};

/// Bytes that Latin-1 prints map to themselves, the others in order to U+0100 and up.
ByteAlphabet make_alphabet() {
  ByteAlphabet alphabet;
  alphabet.bytes.fill(-1);
  uint32_t next = 256;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const bool printed = (byte > 0x20 && byte < 0x7F) || (byte > 0xA0 && byte != 0xAD);
    alphabet.points[byte] = printed ? byte : next++;
    alphabet.bytes[alphabet.points[byte]] = static_cast<int16_t>(byte);
  }
  return alphabet;
}

const ByteAlphabet& alphabet() {
  static const ByteAlphabet made = make_alphabet();
  return made;
}

}  // namespace

std::optional<std::string> bytes_of_name(std::string_view name) {
  std::string bytes;
  for (size_t place = 0; place < name.size();) {
    const Utf8Character next = utf8_character(name, place);
    const int16_t byte =
        next.point < alphabet().bytes.size() ? alphabet().bytes[next.point] : int16_t(-1);
    if (byte < 0) return std::nullopt;
    bytes.push_back(static_cast<char>(byte));
    place += next.bytes;
  }
  return bytes;
}

std::string name_of_byte(unsigned char byte) {
  std::string name;
  append_utf8(alphabet().points[byte], name);
  return name;
}

}  // namespace lockstep
