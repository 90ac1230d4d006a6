#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

/// Characters of a text in UTF-8, which may be malformed. Needs no libtorch.
namespace lockstep {

/// Represents bytes that are not UTF-8; no code point has this value.
inline constexpr uint32_t kMalformed = 0x110000;

struct Utf8Character {
  uint32_t point = kMalformed;
  size_t bytes = 0;  ///< 1 to 4
  /// Malformed so far, but the text ends where a character could continue.
  bool cut_off = false;
};

/// The character that begins at `place`, which must be inside the text. Bytes that are not UTF-8
/// are grouped as Unicode recommends and Python does: as many as could begin a character, or one.
Utf8Character utf8_character(std::string_view text, size_t place);

/// The length of the text without an incomplete character at its end.
size_t whole_characters(std::string_view text);

/// Whether all of it is UTF-8.
bool is_utf8(std::string_view text);

void append_utf8(uint32_t point, std::string& text);

}  // namespace lockstep
