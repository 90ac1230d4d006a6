#include "lockstep/datasets/utf8.h"

#include <algorithm>
#include <cstring>

namespace lockstep {
namespace {

struct LeadByte {
  size_t bytes;
  unsigned char lowest, highest;  ///< of the second byte
};

LeadByte lead_byte(unsigned char first) {
  if (first < 0xC2 || first > 0xF4) return {1, 1, 0};
  if (first < 0xE0) return {2, 0x80, 0xBF};
  if (first == 0xE0) return {3, 0xA0, 0xBF};
  if (first == 0xED) return {3, 0x80, 0x9F};
  if (first < 0xF0) return {3, 0x80, 0xBF};
  if (first == 0xF0) return {4, 0x90, 0xBF};
  return {4, 0x80, static_cast<unsigned char>(first == 0xF4 ? 0x8F : 0xBF)};
}

}  // namespace

Utf8Character utf8_character(std::string_view text, size_t place) {
  const auto first = static_cast<unsigned char>(text[place]);
  if (first < 0x80) return {first, 1};
  const LeadByte lead = lead_byte(first);
  uint32_t point = first & (0x7Fu >> lead.bytes);
  for (size_t i = 1; i < lead.bytes; ++i) {
    if (place + i == text.size()) return {kMalformed, i, true};
    const auto next = static_cast<unsigned char>(text[place + i]);
    const bool good = i == 1 ? next >= lead.lowest && next <= lead.highest : next >> 6 == 2;
    if (!good) return {kMalformed, i};
    point = point << 6 | (next & 0x3F);
  }
  return {lead.bytes == 1 ? kMalformed : point, lead.bytes};
}

size_t whole_characters(std::string_view text) {
  for (size_t back = 1; back <= std::min<size_t>(3, text.size()); ++back) {
    const size_t place = text.size() - back;
    const auto byte = static_cast<unsigned char>(text[place]);
    if (byte >> 6 != 2) return utf8_character(text, place).cut_off ? place : text.size();
  }
  return text.size();
}

bool is_utf8(std::string_view text) {
  for (size_t place = 0; place < text.size();) {
    uint64_t word = 0;
    if (text.size() - place >= sizeof word) {
      std::memcpy(&word, text.data() + place, sizeof word);
      if ((word & 0x8080808080808080u) == 0) {
        place += sizeof word;
        continue;
      }
    }
    const Utf8Character next = utf8_character(text, place);
    if (next.point == kMalformed) return false;
    place += next.bytes;
  }
  return true;
}

void append_utf8(uint32_t point, std::string& text) {
  const auto add = [&](uint32_t byte) { text.push_back(static_cast<char>(byte)); };
  if (point < 0x80) return add(point);
  const int more = point < 0x800 ? 1 : point < 0x10000 ? 2 : 3;
  add((0xFF80u >> more & 0xFF) | point >> (6 * more));
  for (int i = more - 1; i >= 0; --i) add(0x80 | (point >> (6 * i) & 0x3F));
}

}  // namespace lockstep
