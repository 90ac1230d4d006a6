#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// Text that comes in pieces and ends before the first of some strings. What may be the beginning
/// of one is held back until it is known. Needs no libtorch.
class StopStrings {
 public:
  /// ConfigError: one is empty.
  explicit StopStrings(std::vector<std::string> strings);

  /// Takes the next piece and returns what is certain to belong to the text now.
  std::string add(std::string_view piece);
  /// Whether a string has come; nothing is added after it.
  bool found() const { return found_; }
  /// What was held back, where the text ends without any of the strings.
  std::string rest();

 private:
  size_t held_length() const;

  std::vector<std::string> strings_;
  std::string held_;
  bool found_ = false;
};

}  // namespace lockstep
