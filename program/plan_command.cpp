#include "lockstep/program/commands.h"
#include "lockstep/program/plan_arguments.h"

namespace lockstep {

CLI::App* add_plan_command(CLI::App& program) {
  CLI::App* const command =
      program.add_subcommand("plan", "Analyse a job before any process starts");
  command->require_subcommand(1);
  add_plan_groups_command(*command);
  add_plan_buckets_command(*command);
  add_plan_memory_command(*command);
  add_plan_schedule_command(*command);
  add_plan_audit_command(*command);
  return command;
}

}  // namespace lockstep
