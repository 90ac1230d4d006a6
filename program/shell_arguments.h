#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// The arguments that a shell script passes to the Python program that it starts.
struct ShellArguments {
  std::vector<std::string> words;
  bool has_conditions = false;        ///< it has if, case, [, [[, test or !, none of it evaluated
  std::string program;                ///< the word that ends in .py; empty: there is none
  std::vector<std::string> left_out;  ///< such words of other commands with flags
  std::vector<std::string> unset_arrays;  ///< "${NAME[@]}" where the script has not set NAME
};

/// Reads a script without running it, as started without arguments. Understands comments, quotes,
/// assignments of words and arrays, also += and after declare and its like, $NAME, $@ and ${...}
/// with an index and the operators - = + and ?. A variable that the script does not set stays as it
/// is written, and so do $(command), other operators, and expansions in more than 16 others. What
/// `eval` and `sh -c` run is read like the script. The words are those after the last word that
/// ends in .py, in the command with the most flags that `megatron-flags` knows, the first of
/// several; if there is none, those of all arrays, or otherwise all from the first that begins with
/// --. All assignments inside conditions are made.
ShellArguments read_shell_arguments(std::string_view script);

}  // namespace lockstep
