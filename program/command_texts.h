#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "lockstep/core/config_io.h"

/// The texts of the program's commands, as plain data. Manual pages and completions are made from
/// them, so that they say the same as --help.
namespace lockstep {

/// The program's exit status, as every --help and every manual page states it.
inline constexpr char kExitStatus[] =
    "0 done; 1 failed while running; 2 unusable arguments or configuration; 3 stopped early by "
    "SIGTERM or SIGINT, state saved; 4 stopped because the training diverged.";

/// An option, or a positional argument.
struct OptionText {
  std::string name;           ///< "--set", or "CONFIG" for an argument
  std::string value;          ///< "PATH=VALUE"; empty for a flag
  std::string default_value;  ///< empty if there is none
  std::string meaning;
  bool is_argument = false;
  bool required = false;
  bool repeated = false;  ///< takes several values
};

/// A command.
struct CommandText {
  std::string name;  ///< "plan groups"; empty for the program itself
  std::string meaning;
  std::vector<OptionText> options;    ///< arguments first, in their order
  std::vector<std::string> commands;  ///< the first words of the commands inside it
  std::string footer;                 ///< the end of its --help
};

/// The program and all its commands, each before those inside it.
std::vector<CommandText> command_texts(const CLI::App& program);

/// Whether --help of the command ends with the schema of the configuration, which config_fields()
/// gives in a form that is easier to use.
bool ends_with_schema(const CommandText& command);

/// "int64, in layers, >= 1, default 2": what the schema says about a field besides its meaning. A
/// line break in the default appears as \n.
std::string facts_of(const ConfigField& field);

}  // namespace lockstep
