#pragma once

// Internal.

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

/// Suggestions for a misspelled name.
namespace lockstep {

/// The fewest single-character insertions, deletions, replacements and swaps of two neighbours that
/// turn `a` into `b`, with no character edited twice (optimal string alignment). Counts bytes.
size_t edit_distance(std::string_view a, std::string_view b);

/// Whether `found` is close enough to `known` to be a misspelling of it: at most one edit for every
/// three characters of `found`, and one in any case.
bool is_near(std::string_view found, std::string_view known);

/// The names in `known` that are nearest to `found`, in their order: all at the smallest distance,
/// at most three. Empty if none is near.
std::vector<std::string> nearest_names(std::string_view found,
                                       const std::vector<std::string>& known);

/// "; did you mean 'a', 'b' or 'c'?", or `otherwise` if there are no names.
std::string did_you_mean(const std::vector<std::string>& names, const std::string& otherwise = "");

}  // namespace lockstep
