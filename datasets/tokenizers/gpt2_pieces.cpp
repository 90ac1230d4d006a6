#include "lockstep/datasets/gpt2_pieces.h"

#include <vector>

#include "lockstep/datasets/unicode_ranges.h"

namespace lockstep {
namespace {

enum class CharacterClass : uint8_t { other, letter, number, space };

constexpr uint32_t kCodePoints = 0x110000;

/// The class of each code point, and of each byte that is no UTF-8 as one more.
std::vector<CharacterClass> make_classes() {
  std::vector<CharacterClass> classes(kCodePoints + 1, CharacterClass::other);
  const auto fill = [&](const auto& ranges, CharacterClass value) {
    for (const CodePointRange& range : ranges)
      for (uint32_t point = range.first; point <= range.last; ++point) classes[point] = value;
  };
  fill(kLetterRanges, CharacterClass::letter);
  fill(kNumberRanges, CharacterClass::number);
  fill(kSpaceRanges, CharacterClass::space);
  return classes;
}

struct Character {
  CharacterClass type = CharacterClass::other;
  size_t bytes = 0;  ///< 0 at the end of the text
};

class Characters {
 public:
  explicit Characters(std::string_view text) : text_(text) {}

  Character at(size_t place) const {
    static const std::vector<CharacterClass> classes = make_classes();
    if (place >= text_.size()) return {};
    const auto first = static_cast<unsigned char>(text_[place]);
    if (first < 0x80) return {classes[first], 1};
    const auto [point, bytes] = decode(place, first);
    return {classes[point], bytes};
  }

  /// The end of the run of characters of one class from `place` on.
  size_t end_of_run(size_t place, CharacterClass type) const {
    for (Character next = at(place); next.bytes > 0 && next.type == type; next = at(place))
      place += next.bytes;
    return place;
  }

 private:
  struct CodePoint {
    uint32_t value;
    size_t bytes;
  };

  CodePoint decode(size_t place, uint32_t first) const {
    constexpr CodePoint kNone = {kCodePoints, 1};
    const size_t bytes = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
    if (first < 0xC2 || first > 0xF4 || text_.size() - place < bytes) return kNone;
    uint32_t value = first & (0x7F >> bytes);
    for (size_t i = 1; i < bytes; ++i) {
      const auto next = static_cast<unsigned char>(text_[place + i]);
      if ((next & 0xC0) != 0x80) return kNone;
      value = value << 6 | (next & 0x3F);
    }
    const bool too_long = (bytes == 3 && value < 0x800) || (bytes == 4 && value < 0x10000);
    const bool surrogate = value >= 0xD800 && value < 0xE000;
    if (too_long || surrogate || value >= kCodePoints) return kNone;
    return {value, bytes};
  }

  std::string_view text_;
};

/// The length of 's, 't, 're, 've, 'm, 'll or 'd; 0 if there is none.
size_t contraction(std::string_view text) {
  for (const std::string_view ending : {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"})
    if (text.starts_with(ending)) return ending.size();
  return 0;
}

/// White space: all of it at the end of the text, else all but the last character, which goes with
/// what follows, unless it is the only one.
size_t white_space(const Characters& characters, size_t size) {
  size_t end = 0, last = 0;
  for (Character next = characters.at(0); next.bytes > 0 && next.type == CharacterClass::space;
       next = characters.at(end)) {
    last = end;
    end += next.bytes;
  }
  return end == size || last == 0 ? end : last;
}

}  // namespace

size_t gpt2_piece_length(std::string_view text) {
  if (text[0] == '\'')
    if (const size_t length = contraction(text)) return length;
  const Characters characters(text);
  const Character first = characters.at(0);
  if (first.type != CharacterClass::space) return characters.end_of_run(first.bytes, first.type);
  if (text[0] == ' ') {
    const Character second = characters.at(1);
    if (second.bytes > 0 && second.type != CharacterClass::space)
      return characters.end_of_run(1 + second.bytes, second.type);
  }
  return white_space(characters, text.size());
}

}  // namespace lockstep
