#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/datasets/split_pattern.h"

namespace lockstep {

/// GPT-2's pattern for cutting a text before bytes are merged.
inline constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

/// Cuts a text into what a pattern matches and what is between the matches. The pattern is
/// converted once into a table that gives the next state for each state (what may have been matched
/// so far) and each class of characters that the pattern does not distinguish. A piece is read
/// once, without backtracking. Threads may share the cutter. Needs no libtorch.
class PieceCutter {
 public:
  /// FileError, beginning with `place`, for a pattern that matches the empty text or that needs a
  /// table of more than 512 states.
  PieceCutter(const SplitPattern& pattern, const std::string& place);

  struct Piece {
    size_t length = 0;    ///< bytes; the whole text or less
    bool matched = true;  ///< false for what is before the first match
    /// Text that follows may make it longer. 0 bytes if it may be a match.
    bool open = false;
  };

  /// The first piece of `text`, which must not be empty; `last`: no more text follows.
  Piece first(std::string_view text, bool last) const;

 private:
  class Builder;
  /// The position of the next state's row in the table * 2, + 1 if the text so far is a match.
  using Entry = uint32_t;

  /// The length of the match that begins at `begin`, 0 if there is none.
  Piece match(std::string_view text, size_t begin, bool last) const;

  std::vector<uint8_t> classes_;  ///< of each code point and of kMalformed
  std::array<uint8_t, 128> ascii_ = {};
  std::vector<Entry> table_;  ///< [states, classes + 1]; the last column for the end of the text
  size_t columns_ = 0;
};

}  // namespace lockstep
