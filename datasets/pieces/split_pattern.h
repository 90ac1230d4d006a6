#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/datasets/character_set.h"

/// The regular expressions that cut a text into pieces. Needs no libtorch.
namespace lockstep {

/// A step of the machine that tries to match a pattern from one place of a text on. It prefers what
/// comes first, like a backtracking regular expression.
struct PatternStep {
  enum class Kind : uint8_t {
    character,   ///< takes one character of sets[set], then goes to `next`
    fork,        ///< goes to `next`, or else to `other`
    not_before,  ///< goes to `next` unless a character of sets[set] follows
    match
  };
  Kind kind = Kind::match;
  uint32_t next = 0;
  uint32_t other = 0;
  uint32_t set = 0;
};

struct SplitPattern {
  std::vector<CharacterSet> sets;
  std::vector<PatternStep> steps;
  uint32_t first = 0;  ///< step
};

/// Reads a regular expression in Oniguruma's notation: alternatives, groups (also (?:...) and, of
/// ASCII letters, (?i:...)), characters, \r \n \t \s \S, \p{} and \P{} of the names that
/// category_set() takes, classes in brackets, ? * + {n} {n,} {n,m}, and (?!X) where X is one of
/// these characters or classes. In (?i:...), letters that together equal one other character, such
/// as ss, must not be adjacent.
/// FileError, beginning with `place`, for anything else, with its byte position.
SplitPattern parse_split_pattern(std::string_view pattern, const std::string& place);

/// The pattern that matches exactly `text`.
SplitPattern literal_split_pattern(std::string_view text, const std::string& place);

}  // namespace lockstep
