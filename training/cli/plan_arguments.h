#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

/// What the commands of `lockstep plan` share: how their arguments are read and their errors told.
namespace lockstep {

/// Each adds one command to `lockstep plan`.
void add_plan_groups_command(CLI::App& plan);
void add_plan_buckets_command(CLI::App& plan);
void add_plan_memory_command(CLI::App& plan);
void add_plan_schedule_command(CLI::App& plan);

/// "plan groups --world-size 8 --tensor 3": what was asked for, to stand before an error.
std::string given(const CLI::App& command);

/// Integers separated by `separator`; empty unless all of `text` is that.
std::vector<int64_t> parse_integers(const std::string& text, char separator);

/// Checks for CLI::Option::check(), of an integer and of a list as in 2,4. (CLI11 alone takes a
/// number that is too large for the largest one.)
std::string check_integer(const std::string& text);
std::string check_integers(const std::string& text);

/// Throws FileError unless what `command` has printed has reached standard output.
void flush_output(const CLI::App& command);

}  // namespace lockstep
