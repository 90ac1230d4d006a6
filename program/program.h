#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <vector>

namespace lockstep {

/// Runs a program with the commands that `add_commands` adds. Returns, or ends the process with,
/// the exit status: 0 done, 1 failed while running, 2 unusable arguments or configuration, or that
/// of an ExitStatus that a command throws.
int run_program(int argc, char** argv, const std::function<void(CLI::App& program)>& add_commands);

/// run_program() with the arguments before the first "--". `add_command` adds the command, which
/// takes the `words` after it as they are: CLI11 would take apart a word in brackets.
int run_program_with_words(
    int argc, char** argv,
    const std::function<void(CLI::App& program, const std::vector<std::string>& words)>&
        add_command);

}  // namespace lockstep
