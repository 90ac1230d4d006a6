#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/core/counted.h"
#include "lockstep/program/commands.h"
#include "lockstep/program/plan_arguments.h"
#include "lockstep/training/planned_job.h"

namespace lockstep {
namespace {

struct VerifyArguments {
  std::string config_path;
  std::vector<std::string> overrides;
  int64_t world_size = 0;
  bool json = false;
};

nlohmann::ordered_json to_json(const OrderVerdict& verdict, int64_t world_size) {
  if (verdict.ok())
    return {{"ok", true},
            {"world_size", world_size},
            {"classes", verdict.classes},
            {"operations", verdict.num_operations}};
  return {{"ok", false},
          {"reason", verdict.reason == OrderVerdict::Reason::deadlock ? "deadlock" : "mismatch"},
          {"ranks", verdict.ranks},
          {"operations", verdict.operations}};
}

void write_text(const OrderVerdict& verdict, int64_t world_size) {
  if (verdict.ok()) {
    std::cout << fmt::format(
        "{} under the rules of NCCL and of Gloo: {} in {} of ranks\n",
        world_size == 1 ? "the one rank finishes" : fmt::format("all {} ranks finish,", world_size),
        counted(verdict.num_operations, "operation"),
        counted(static_cast<int64_t>(verdict.classes), "class"));
    return;
  }
  const bool stuck = verdict.reason == OrderVerdict::Reason::deadlock;
  std::cout << (stuck ? fmt::format("deadlock under the rules of {}: each waits for the next\n",
                                    verdict.rules)
                      : "mismatch\n");
  for (const std::string& operation : verdict.operations) std::cout << "  " << operation << '\n';
}

void verify_plan(const CLI::App& command, const VerifyArguments& arguments) {
  const Config config = load_config(arguments.config_path, arguments.overrides);
  OrderVerdict verdict;
  try {
    verdict = verify_job(config, arguments.world_size);
  } catch (const ConfigError& error) {
    fail<ConfigError>("{}", with_option_names(command, error.what()));
  }
  if (arguments.json)
    std::cout << to_json(verdict, arguments.world_size).dump() << '\n';
  else
    write_text(verdict, arguments.world_size);
  flush_output(command);
  if (!verdict.ok()) throw ExitStatus{1, verdict.to_string()};
}

constexpr const char* kVerifyFooter =
    "Runs the program of `lockstep train` itself for one rank of each class, on tensors without "
    "data. It builds the model, takes two training steps with gathers, norms and the optimizer, "
    "compares the ranks after each step, and validates. Then it proves that all ranks finish, or "
    "names those that do not: all ranks of a group call the same operations in the same order "
    "(operation, label, dtype, number of elements), every message is received, and no ranks wait "
    "for each other in a cycle, within or across groups. This is checked under the rules of NCCL "
    "(operations run in streams, first uses block the host, nothing is buffered) and of Gloo "
    "(waits "
    "block the host).\n"
    "JSON: ok, world_size, classes (of ranks that do the same; one of each was run), operations "
    "(collectives and messages of all ranks); or ok, reason (deadlock or mismatch), ranks, "
    "operations (where each of those ranks is).\n"
    "Exit status: 0 all finish; 1 they do not. Needs no GPU, no data and no other process.";

}  // namespace

void add_plan_verify_command(CLI::App& plan) {
  auto arguments = std::make_shared<VerifyArguments>();
  CLI::App* const command = plan.add_subcommand(
      "verify", "Prove that all ranks of a job finish: no deadlock, no mismatch");
  add_config_options(*command, arguments->config_path, arguments->overrides);
  command->add_option("--world-size", arguments->world_size, "Number of ranks of the job")
      ->required()
      ->check(check_integer);
  command->add_flag("--json", arguments->json, "Print one JSON document");
  command->footer(kVerifyFooter);
  command->callback([command, arguments] { verify_plan(*command, *arguments); });
}

}  // namespace lockstep
