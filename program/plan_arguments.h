#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/program/argument_checks.h"

/// The common parts of the commands of `lockstep plan`, such as how they report errors.
namespace lockstep {

/// Each adds one command to `lockstep plan`.
void add_plan_groups_command(CLI::App& plan);
void add_plan_buckets_command(CLI::App& plan);
void add_plan_memory_command(CLI::App& plan);
void add_plan_schedule_command(CLI::App& plan);
void add_plan_audit_command(CLI::App& plan);

/// A message about the parameters of a plan, "world-size (8) is not divisible by tensor (3)", with
/// the names that `command` has for them: "--world-size (8) is not divisible by --tensor (3)".
std::string with_option_names(const CLI::App& command, std::string_view message);

/// Adds --world-size to a command that also works without it.
void add_optional_world_size(CLI::App& command, std::optional<int64_t>& world_size);

/// Adds --world-size and --machine to a command that needs both; see machine_file().
void add_machine_options(CLI::App& command, int64_t& world_size, std::string& machine_path);

/// Throws FileError unless what `command` has printed has reached standard output.
void flush_output(const CLI::App& command);

}  // namespace lockstep
