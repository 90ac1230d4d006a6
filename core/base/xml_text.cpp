#include "lockstep/core/xml_text.h"

#include <algorithm>
#include <cstdint>

namespace lockstep {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

/// Bytes of the character that `text` begins with; 0 if XML does not allow it.
size_t length_of_character(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t first = byte(0);
  if (first < 0x80) {
    const bool allowed = (first >= 0x20 && first != 0x7F) || first == '\t' || first == '\n';
    return allowed ? 1 : 0;
  }
  const size_t length = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC2 || first > 0xF4 || text.size() < length) return 0;
  uint32_t code = first & (0xFFU >> (length + 1));
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
    code = code << 6 | (byte(i) & 0x3F);
  }
  constexpr uint32_t kLeast[] = {0x80, 0x800, 0x10000};
  const bool surrogate = code >= 0xD800 && code < 0xE000;
  const bool allowed = code >= kLeast[length - 2] && code <= 0x10FFFF && !surrogate &&
                       code != 0xFFFE && code != 0xFFFF;
  return allowed ? length : 0;
}

}  // namespace

std::string xml_text(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    const size_t length = length_of_character(text);
    const std::string_view character = text.substr(0, std::max<size_t>(length, 1));
    text.remove_prefix(character.size());
    if (length == 0)
      result += kReplacement;
    else if (character == "&")
      result += "&amp;";
    else if (character == "<")
      result += "&lt;";
    else if (character == ">")
      result += "&gt;";
    else if (character == "\"")
      result += "&quot;";
    else if (character == "'")
      result += "&apos;";
    else
      result += character;
  }
  return result;
}

}  // namespace lockstep
