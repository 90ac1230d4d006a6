#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace lockstep {

/// Runs a program with the commands that `add_commands` adds. Returns, or ends the process with,
/// the exit status: 0 done, 1 failed while running, 2 unusable arguments or configuration, or that
/// of an ExitStatus that a command throws.
int run_program(int argc, char** argv, const std::function<void(CLI::App& program)>& add_commands);

}  // namespace lockstep
