#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/datasets/batch_sizes.h"
#include "lockstep/planner/config_grids.h"
#include "lockstep/planner/machine.h"
#include "lockstep/planner/memory_plan.h"
#include "lockstep/planner/model_flops.h"
#include "lockstep/planner/time_simulation.h"
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

struct TimePlan {
  StepTime time;
  double tflops_per_device = 0;  ///< of the model
  double utilisation = 0;        ///< of the peak
  MemoryPlan memory;
};

TimePlan plan_time(const Config& config, int64_t world_size, const Machine& machine) {
  TimePlan plan;
  plan.time = simulate_step(record_job(config, world_size, /*kernels=*/true), machine);
  const RankGrids grids = config_grids(config.parallel, world_size);
  const double tokens =
      static_cast<double>(batch_sizes(config.train, grids.data_parallel_size()).global) *
      static_cast<double>(config.model.seq_length);
  const double rate =
      tokens * model_flops_per_token(config) / plan.time.step_s / static_cast<double>(world_size);
  plan.tflops_per_device = rate / 1e12;
  const bool half =
      config.train.precision == Precision::bf16 || config.train.precision == Precision::fp16;
  plan.utilisation = rate / (half ? machine.half_flops_per_s : machine.wide_flops_per_s);
  plan.memory = plan_memory(config, world_size);
  return plan;
}

nlohmann::ordered_json to_json(const RankTime& rank) {
  nlohmann::ordered_json exposed = nlohmann::ordered_json::object();
  for (const auto& [group, seconds] : rank.exposed_s) exposed[group] = 1e3 * seconds;
  return {{"rank", rank.rank},
          {"ranks", rank.num_ranks},
          {"compute_ms", 1e3 * rank.compute_s},
          {"optimizer_ms", 1e3 * rank.optimizer_s},
          {"exposed_communication_ms", std::move(exposed)},
          {"bubble_ms", 1e3 * rank.bubble_s}};
}

void write_time_json(const TimePlan& plan) {
  nlohmann::ordered_json json = {{"step_ms", 1e3 * plan.time.step_s},
                                 {"tflops_per_device", plan.tflops_per_device},
                                 {"utilisation", plan.utilisation},
                                 {"compute_ms", 1e3 * plan.time.compute_s()},
                                 {"optimizer_ms", 1e3 * plan.time.optimizer_s()},
                                 {"bubble_ms", 1e3 * plan.time.bubble_s()},
                                 {"exposed_communication_ms", 1e3 * plan.time.exposed_s()}};
  for (const StageMemory& stage : plan.memory.stages)
    json["peak_bytes"].push_back(stage.total_bytes());
  for (const RankTime& rank : plan.time.ranks) json["classes"].push_back(to_json(rank));
  std::cout << json.dump() << "\n";
}

void write_time_text(const TimePlan& plan, const Machine& machine) {
  std::cout << fmt::format(
      "on {}: {:.1f} ms a step, {:.1f} TFLOP/s of a device, {:.1f} % of the peak\n"
      "averages of all ranks, ms: compute {:.1f}, exposed communication {:.1f}, bubble {:.1f}, "
      "optimizer {:.1f}\n",
      machine.name, 1e3 * plan.time.step_s, plan.tflops_per_device, 100 * plan.utilisation,
      1e3 * plan.time.compute_s(), 1e3 * plan.time.exposed_s(), 1e3 * plan.time.bubble_s(),
      1e3 * plan.time.optimizer_s());
  std::cout << fmt::format("\n{:>8}  {:>8}  {:>10}  {:>10}  {:>10}  {:>10}  exposed by group\n",
                           "rank", "alike", "compute", "exposed", "bubble", "optimizer");
  for (const RankTime& rank : plan.time.ranks) {
    std::string groups;
    for (const auto& [group, seconds] : rank.exposed_s)
      groups += fmt::format("{}{} {:.1f}", groups.empty() ? "" : ", ", group, 1e3 * seconds);
    std::cout << fmt::format("{:>8}  {:>8}  {:>10.1f}  {:>10.1f}  {:>10.1f}  {:>10.1f}  {}\n",
                             rank.rank, rank.num_ranks, 1e3 * rank.compute_s,
                             1e3 * rank.exposed_total_s(), 1e3 * rank.bubble_s,
                             1e3 * rank.optimizer_s, groups);
  }
}

void plan_time_of(const CLI::App& command, const TimeArguments& arguments) {
  const Config config = load_config(arguments.config_path, arguments.overrides);
  const Machine machine = load_machine(machine_file(arguments.machine_path));
  TimePlan plan;
  try {
    plan = plan_time(config, arguments.world_size, machine);
  } catch (const ConfigError& error) {
    fail<ConfigError>("{}", with_option_names(command, error.what()));
  }
  if (arguments.json)
    write_time_json(plan);
  else
    write_time_text(plan, machine);
  flush_output(command);
}

constexpr const char* kTimeFooter =
    "Runs the recorded programs of `lockstep train` (see `lockstep plan verify --help`) on the "
    "costs of a machine: each kernel takes what its products and its bytes take, each collective a "
    "latency and its bytes over the link, and streams overlap. Not counted: the host, data, "
    "contention between streams.\n"
    "Machine files: `lockstep doctor --calibrate` writes one, dgx_a100 and dgx_h100 come along; "
    "see docs/planning.md.\n"
    "JSON: step_ms; tflops_per_device and utilisation (operations of the model, without "
    "recomputation); compute_ms, optimizer_ms, bubble_ms (waiting for other ranks) and "
    "exposed_communication_ms (waiting for an operation under way), averages of all ranks, which "
    "add up to step_ms; peak_bytes of each stage, as plan memory; classes, with the same parts for "
    "one rank of each, exposed communication by group.";

}  // namespace

void add_plan_time_command(CLI::App& plan) {
  auto arguments = std::make_shared<TimeArguments>();
  CLI::App* const command =
      plan.add_subcommand("time", "Predict the time of a training step on a machine");
  add_config_options(*command, arguments->config_path, arguments->overrides);
  command->add_option("--world-size", arguments->world_size, "Ranks of the job")
      ->required()
      ->check(check_integer);
  command
      ->add_option("--machine", arguments->machine_path,
                   "Machine file, or the name of one in configs/machines")
      ->type_name("FILE")
      ->required()
      ->check(check_path);
  command->add_flag("--json", arguments->json, "Print one JSON document");
  command->footer(kTimeFooter);
  command->callback([command, arguments] { plan_time_of(*command, *arguments); });
}

}  // namespace lockstep
