#pragma once

#include <string>
#include <vector>

#include "lockstep/core/config_io.h"
#include "lockstep/program/command_texts.h"

/// Scripts that let a shell complete commands, options, the paths of --set, files, and the values
/// of fields and options that have few of them.
namespace lockstep {

/// For bash 4 and later.
std::string bash_completion(const std::vector<CommandText>& commands,
                            const std::vector<ConfigField>& fields);

/// For zsh 5; a function file, which may also be sourced.
std::string zsh_completion(const std::vector<CommandText>& commands,
                           const std::vector<ConfigField>& fields);

}  // namespace lockstep
