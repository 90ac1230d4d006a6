#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "lockstep/datasets/unicode_ranges.h"

/// Sets of characters. Needs no libtorch.
namespace lockstep {

/// Ranges of code points, ascending, with a gap between any two; up to kMalformed of utf8.h, which
/// is in none of the sets below, but only in the complement of one.
using CharacterSet = std::vector<CodePointRange>;

CharacterSet union_of(const CharacterSet& left, const CharacterSet& right);
CharacterSet opposite_of(const CharacterSet& set);

/// The set, plus the other case of the ASCII letters in it; with s also U+017F and with k also
/// U+212A, which are the same letters in another case.
CharacterSet with_other_case(const CharacterSet& set);

/// White space.
CharacterSet space_set();

/// The letters (L), marks (M), numbers (N), punctuation (P) or symbols (S) of Unicode, or its
/// letters of one kind: in upper case (Lu), lower case (Ll) or title case (Lt), modifiers (Lm) or
/// others (Lo). None for any other name.
std::optional<CharacterSet> category_set(std::string_view name);

bool equal_sets(const CharacterSet& left, const CharacterSet& right);
/// Whether it holds one character.
bool is_single(const CharacterSet& set);

}  // namespace lockstep
