#pragma once

// Internal.

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

/// What is wrong with the arguments, in the words of this program.
namespace lockstep {

/// "not expected: --sett; did you mean '--set'?", for the arguments that no command takes; empty if
/// there are none. `given`: all arguments, which tell where an option stands that the command has.
std::string unexpected_arguments(const CLI::App& program, const std::vector<std::string>& given);

/// CLI11's message, or for values that CLI11 itself refuses what was found and what is allowed;
/// then "; see `lockstep train --help`".
std::string describe_argument_error(const CLI::App& program, const CLI::ParseError& error);

}  // namespace lockstep
