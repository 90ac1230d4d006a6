#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// A token that is searched for in a text before anything else is done to the text.
struct AddedToken {
  uint32_t id = 0;
  std::string content;
  bool lstrip = false;  ///< takes the white space before it
  bool rstrip = false;  ///< and after it
};

/// Finds the first of several tokens in a text; of two that begin at the same place, the longer
/// one. Threads may share it. Needs no libtorch.
class AddedTokenFinder {
 public:
  AddedTokenFinder() = default;
  /// Contents must not be empty; of two equal ones the first counts.
  explicit AddedTokenFinder(std::vector<AddedToken> tokens);

  struct Found {
    const AddedToken* token = nullptr;  ///< nullptr if there is none, or that is not decided yet
    size_t begin = 0;  ///< of the token; without one: up to here there is none, whatever follows
    size_t end = 0;    ///< of the token
    /// The token's content, without the white space that it takes; if there is no token, both are
    /// where the search stopped.
    size_t content_begin = 0;
    size_t content_end = 0;
  };

  /// The first token whose content begins at `from` or later. It takes no white space before
  /// `used`, the end of the previous token. That may be after `from`: the white space that one
  /// token takes can also be the beginning of the next one. If the text is not `closed`, more of it
  /// may follow.
  Found find(std::string_view text, size_t from, size_t used, bool closed) const;

 private:
  /// The tokens that begin like the text at `place`: the longest that is completely there, and
  /// whether a longer one may be.
  struct Candidate {
    const AddedToken* token = nullptr;
    bool longer = false;
  };
  Candidate candidate(std::string_view text, size_t place) const;

  std::vector<AddedToken> tokens_;  ///< ordered by their bytes
  std::array<bool, 256> begins_ = {};
  bool any_lstrip_ = false;
};

}  // namespace lockstep
