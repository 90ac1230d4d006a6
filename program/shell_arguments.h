#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// What a shell script hands to the Python program that it starts.
struct ShellArguments {
  std::vector<std::string> words;
  bool has_conditions = false;  ///< the script has `if` or `case`, which are not evaluated
};

/// Reads a script without running it. Knows comments, quotes, assignments of words and arrays, +=
/// of arrays, and $NAME, ${NAME}, ${NAME:-otherwise}, ${NAME[@]}; a variable that the script does
/// not set stays as it is written, and so does $(command). The words are those behind the last
/// word that ends in .py; where there is none, those of all arrays, or else all from the first that
/// begins with --. Assignments inside conditions are all made.
ShellArguments read_shell_arguments(std::string_view script);

}  // namespace lockstep
