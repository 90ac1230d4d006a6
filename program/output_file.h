#pragma once

#include <string>

/// Files that an option of the command line names. Needs no libtorch.
namespace lockstep {

/// For a command that also prints: ConfigError that names `option` if `path` is standard output,
/// where the file would replace what is printed.
void check_apart_from_output(const char* option, const std::string& path);

}  // namespace lockstep
