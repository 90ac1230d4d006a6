#pragma once

#include <string>
#include <vector>

/// Megatron-LM's command line as a configuration of this program.
namespace lockstep {

/// A flag as it is given.
struct GivenFlag {
  std::string name;  ///< "--num-layers"
  std::vector<std::string> values;
};

/// Splits the words of a command line into flags, including --name=value. ConfigError: a word that
/// belongs to no flag; too many or too few values of a flag that is in the table.
std::vector<GivenFlag> read_megatron_flags(const std::vector<std::string>& words);

struct MegatronConversion {
  std::string text;                ///< a configuration, as a text protobuf
  std::vector<std::string> notes;  ///< "--flag: why it is not in the text", one line each
  /// Names all flags that are not in the table, and the nearest that are; empty: there are none.
  std::string unknown = {};
};

/// The configuration for the run that `flags` describe: what the known ones say, and Megatron-LM's
/// own defaults where those differ from the ones here. If a flag occurs twice, the last one counts.
/// ConfigError naming the flag: a value that should be a number and is not, flags that exclude each
/// other.
MegatronConversion convert_megatron_flags(const std::vector<GivenFlag>& flags);

/// The table of flags as a table of Markdown.
std::string megatron_flags_markdown();

}  // namespace lockstep
