#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/program/shell_arguments.h"

namespace lockstep {

using ShellWords = std::vector<std::string>;

/// `word` between single quotes.
std::string quoted_shell_word(std::string word);

/// Words as a script has them. Only blanks and quotes are quoted: operators count in `eval`.
std::string joined_shell_words(const ShellWords& words);

/// What `eval WORDS` or `sh -c TEXT` reads as a script of its own.
std::optional<std::string> inner_shell_script(const ShellWords& words);

/// Whether NAME=value is an assignment after these words of a command.
bool is_shell_assignment_place(const ShellWords& words);

/// What is known of a script and of those that it runs.
class ShellScript {
 public:
  /// The elements of an array. A variable without an index is the first.
  std::map<std::string, ShellWords, std::less<>> variables;

  /// Takes the words of a command: its flags, if it has any.
  void take(const ShellWords& words);
  void take_array(const ShellWords& elements) {
    in_arrays_.insert(in_arrays_.end(), elements.begin(), elements.end());
  }
  /// `written`: how an array that is not set is used.
  void take_unset_array(std::string_view written);
  /// What the whole script passes to its program.
  ShellArguments result() const;

 private:
  void take_program(const std::string& program, ShellWords words);

  ShellWords in_arrays_, loose_;
  ShellArguments result_;
  std::ptrdiff_t known_ = 0;  ///< flags of `result_` in the table of `megatron-flags`
};

}  // namespace lockstep
