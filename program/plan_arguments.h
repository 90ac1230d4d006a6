#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "lockstep/program/argument_checks.h"

/// What the commands of `lockstep plan` share: how their errors are told.
namespace lockstep {

/// Each adds one command to `lockstep plan`.
void add_plan_groups_command(CLI::App& plan);
void add_plan_buckets_command(CLI::App& plan);
void add_plan_memory_command(CLI::App& plan);
void add_plan_schedule_command(CLI::App& plan);

/// "plan groups --world-size 8 --tensor 3": what was asked for, to stand before an error.
std::string given(const CLI::App& command);

/// Throws FileError unless what `command` has printed has reached standard output.
void flush_output(const CLI::App& command);

}  // namespace lockstep
