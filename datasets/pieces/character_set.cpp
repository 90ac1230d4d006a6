#include "lockstep/datasets/character_set.h"

#include <algorithm>
#include <span>

#include "lockstep/datasets/unicode_letters.h"
#include "lockstep/datasets/utf8.h"

namespace lockstep {
namespace {

bool same_range(const CodePointRange& left, const CodePointRange& right) {
  return left.first == right.first && left.last == right.last;
}

CharacterSet listed(std::span<const CodePointRange> ranges) {
  return {ranges.begin(), ranges.end()};
}

CharacterSet difference_of(const CharacterSet& left, const CharacterSet& right) {
  return opposite_of(union_of(opposite_of(left), right));
}

/// Letters of one kind: upper case, lower case, title case, modifiers, or others.
std::optional<CharacterSet> letter_set(std::string_view name) {
  if (name == "Lu") return listed(kUppercaseLetterRanges);
  if (name == "Ll") return listed(kLowercaseLetterRanges);
  if (name == "Lt") return listed(kTitlecaseLetterRanges);
  if (name == "Lm") return listed(kModifierLetterRanges);
  if (name != "Lo") return std::nullopt;
  CharacterSet others = listed(kLetterRanges);
  for (const char* const kind : {"Lu", "Ll", "Lt", "Lm"})
    others = difference_of(others, *letter_set(kind));
  return others;
}

}  // namespace

CharacterSet union_of(const CharacterSet& left, const CharacterSet& right) {
  CharacterSet all = left, joined;
  all.insert(all.end(), right.begin(), right.end());
  std::sort(all.begin(), all.end(),
            [](const CodePointRange& a, const CodePointRange& b) { return a.first < b.first; });
  for (const CodePointRange& range : all) {
    if (joined.empty() || range.first > joined.back().last + 1)
      joined.push_back(range);
    else
      joined.back().last = std::max(joined.back().last, range.last);
  }
  return joined;
}

CharacterSet opposite_of(const CharacterSet& set) {
  CharacterSet opposite;
  uint32_t begin = 0;
  for (const CodePointRange& range : set) {
    if (range.first > begin) opposite.push_back({begin, range.first - 1});
    begin = range.last + 1;
  }
  if (begin <= kMalformed) opposite.push_back({begin, kMalformed});
  return opposite;
}

CharacterSet with_other_case(const CharacterSet& set) {
  constexpr uint32_t kLongS = 0x17F, kKelvin = 0x212A;
  CharacterSet more;
  const auto has = [&](uint32_t point) {
    return std::any_of(set.begin(), set.end(), [&](const CodePointRange& range) {
      return range.first <= point && point <= range.last;
    });
  };
  for (uint32_t upper = 'A'; upper <= 'Z'; ++upper) {
    const uint32_t lower = upper - 'A' + 'a';
    if (!has(upper) && !has(lower)) continue;
    more.push_back({upper, upper});
    more.push_back({lower, lower});
    if (lower == 's') more.push_back({kLongS, kLongS});
    if (lower == 'k') more.push_back({kKelvin, kKelvin});
  }
  return union_of(set, more);
}

CharacterSet space_set() { return listed(kSpaceRanges); }

std::optional<CharacterSet> category_set(std::string_view name) {
  if (name == "L") return listed(kLetterRanges);
  if (name == "M") return listed(kMarkRanges);
  if (name == "N") return listed(kNumberRanges);
  if (name == "P") return listed(kPunctuationRanges);
  if (name == "S") return listed(kSymbolRanges);
  return letter_set(name);
}

bool equal_sets(const CharacterSet& left, const CharacterSet& right) {
  return std::equal(left.begin(), left.end(), right.begin(), right.end(), same_range);
}

bool is_single(const CharacterSet& set) { return set.size() == 1 && set[0].first == set[0].last; }

}  // namespace lockstep
