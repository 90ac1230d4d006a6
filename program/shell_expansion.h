#pragma once

#include <string_view>

namespace lockstep {

/// What a shell writes after a $: NAME, {NAME}, {NAME[INDEX]}, one of these with an operator and
/// its word, as in {NAME:-word}, or something else, such as (command).
struct ShellExpansion {
  std::string_view written;  ///< all of it, with the $
  std::string_view name;     ///< empty: it is something else, which stays as it is written
  std::string_view index;    ///< between the brackets; empty: there are none
  char operation = 0;        ///< - = + or ?, also after a colon; 0: none
  bool colon = false;        ///< the operator begins with a colon: an empty value counts as none
  std::string_view word;     ///< after the operator
  bool is_all() const { return index == "@" || index == "*"; }
  bool is_arguments() const { return name == "@" || name == "*"; }
};

bool is_shell_name(std::string_view text);

/// The expansion that begins with the $ at `at`, up to the end of the text if it is not closed.
/// Braces inside braces are matched. Moves `at` behind it.
ShellExpansion read_shell_expansion(std::string_view text, size_t& at);

}  // namespace lockstep
