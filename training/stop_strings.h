#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// Text that arrives in pieces and ends before one of some strings: the one that is complete first,
/// and of those that are complete at the same place the longest. So the pieces do not matter. What
/// may be the beginning of such a string is held back until that is decided. Needs no libtorch.
class StopStrings {
 public:
  /// ConfigError: one is empty.
  explicit StopStrings(std::vector<std::string> strings);

  /// Takes the next piece and returns what is now certain to belong to the text.
  std::string add(std::string_view piece);
  /// Whether a stop string has occurred; nothing is added after it.
  bool found() const { return found_; }
  /// The part that was held back, if the text ends without any of the strings.
  std::string rest();

 private:
  size_t held_length() const;

  std::vector<std::string> strings_;
  std::string held_;
  bool found_ = false;
};

}  // namespace lockstep
