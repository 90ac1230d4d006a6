#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// The arguments that a shell script passes to the Python program that it starts.
struct ShellArguments {
  std::vector<std::string> words;
  bool has_conditions = false;  ///< the script has `if` or `case`, which are not evaluated
};

/// Reads a script without running it. Understands comments, quotes, assignments of words and
/// arrays, += of arrays, and $NAME, ${NAME}, ${NAME:-otherwise}, ${NAME[@]}; a variable that the
/// script does not set stays as it is written, and so does $(command). What `eval` and `sh -c` run
/// is read like the script. The words are those after the last word that ends in .py; if there is
/// none, those of all arrays, or otherwise all from the first that begins with --. All assignments
/// inside conditions are made.
ShellArguments read_shell_arguments(std::string_view script);

}  // namespace lockstep
