#pragma once

#include <string>
#include <vector>

#include "lockstep/core/config_io.h"
#include "lockstep/program/command_texts.h"

/// Scripts that let a shell complete commands, options, the paths of --set, files, configurations
/// by their names, and the values of fields and options that have only a few. `configs` are the
/// names of the configurations that come with the program.
namespace lockstep {

/// The script for bash 4 and later.
std::string bash_completion(const std::vector<CommandText>& commands,
                            const std::vector<ConfigField>& fields,
                            const std::vector<std::string>& configs);

/// The script for zsh 5: a function file, which may also be sourced.
std::string zsh_completion(const std::vector<CommandText>& commands,
                           const std::vector<ConfigField>& fields,
                           const std::vector<std::string>& configs);

}  // namespace lockstep
