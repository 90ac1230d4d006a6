#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/program/argument_checks.h"

/// What the commands of `lockstep plan` share: how their errors are told.
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

/// --world-size of a command that also works without.
void add_optional_world_size(CLI::App& command, std::optional<int64_t>& world_size);

/// --world-size and --machine of a command that needs both; see machine_file().
void add_machine_options(CLI::App& command, int64_t& world_size, std::string& machine_path);

/// Throws FileError unless what `command` has printed has reached standard output.
void flush_output(const CLI::App& command);

}  // namespace lockstep
