#include <iostream>
#include <memory>

#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/parallel_state/job_program.h"
#include "lockstep/planner/machine.h"
#include "lockstep/planner/time_plan.h"
#include "lockstep/program/commands.h"
#include "lockstep/program/named_configs.h"
#include "lockstep/program/plan_arguments.h"
#include "lockstep/training/planned_job.h"

namespace lockstep {
namespace {

struct TimeArguments {
  std::string config_path, machine_path;
  std::vector<std::string> overrides;
  int64_t world_size = 0;
  bool json = false;
};

void plan_time_of(const CLI::App& command, const TimeArguments& arguments) {
  const Config config = load_config(arguments.config_path, arguments.overrides);
  const Machine machine = load_machine(machine_file(arguments.machine_path));
  TimePlan plan;
  try {
    plan = plan_time(config, record_job(config, arguments.world_size, /*kernels=*/true), machine);
  } catch (const ConfigError& error) {
    fail<ConfigError>("{}", with_option_names(command, error.what()));
  }
  if (arguments.json)
    write_json(std::cout, plan);
  else
    write_text(std::cout, plan);
  flush_output(command);
}

constexpr const char* kTimeFooter =
    "Simulates the recorded programs of `lockstep train` (see `lockstep plan verify --help`) with "
    "the costs of a machine. A kernel costs its arithmetic and its memory traffic, a collective "
    "costs a latency and its bytes over the link, and streams overlap. The host costs what the "
    "machine file says of a launch. Not counted: reading data, contention between streams.\n"
    "Machine files: dgx_a100, dgx_h100 and h100_measured are included, and `lockstep doctor "
    "--calibrate` writes one; see docs/planning.md.\n"
    "JSON: step_ms; tflops_per_device (operations of the model, without recomputation) and "
    "utilisation (its share of the machine's peak in train.precision; with train.fp8 in FP8, if "
    "that is higher); compute_ms, optimizer_ms, bubble_ms (waiting for other ranks) and "
    "exposed_communication_ms (waiting for an operation in progress): averages over all ranks, "
    "which add up to step_ms; peak_bytes of each stage (peak memory of the tensors of a rank); "
    "classes (the same parts for one rank of each class, with exposed communication by group).";

}  // namespace

void add_plan_time_command(CLI::App& plan) {
  auto arguments = std::make_shared<TimeArguments>();
  CLI::App* const command =
      plan.add_subcommand("time", "Predict the time of a training step on a machine");
  add_config_options(*command, arguments->config_path, arguments->overrides);
  add_machine_options(*command, arguments->world_size, arguments->machine_path);
  command->add_flag("--json", arguments->json, "Print one JSON document");
  command->footer(kTimeFooter);
  command->callback([command, arguments] { plan_time_of(*command, *arguments); });
}

}  // namespace lockstep
