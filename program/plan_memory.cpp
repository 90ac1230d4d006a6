#include <iostream>
#include <memory>

#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/planner/memory_plan.h"
#include "lockstep/program/commands.h"
#include "lockstep/program/plan_arguments.h"
#include "lockstep/training/supported_config.h"

namespace lockstep {
namespace {

struct MemoryArguments {
  std::string config_path;
  std::vector<std::string> overrides;
  std::optional<int64_t> world_size;
  bool json = false;
};

void plan_memory_of(const CLI::App& command, const MemoryArguments& arguments) {
  const Config config = load_config(arguments.config_path, arguments.overrides);
  try {
    check_supported(config);
    (arguments.json ? write_json : write_text)(std::cout,
                                               plan_memory(config, arguments.world_size));
  } catch (const Error& error) {
    fail<ConfigError>("{}", with_option_names(command, error.what()));
  }
  flush_output(command);
}

constexpr const char* kMemoryFooter =
    "Memory of one rank of each pipeline stage. JSON: world_size, and for each of stages: stage; "
    "parameters (the number of elements, including rows that pad the vocabulary, without the "
    "padding of buffers); parameter_bytes and gradient_bytes (the buffers, padding included); "
    "optimizer_bytes (moments and master weights); activation_bytes (what backward needs of the "
    "micro-batches in flight, and tables of the model); communication_bytes (what communication "
    "needs besides the buffers); host_bytes (in the host's memory, not part of the total; only "
    "with optimizer.offload or model.offload_activations and train.device = cuda); total_bytes. "
    "The text form is in MiB (1048576 bytes).\n"
    "Not counted: libtorch itself, fragmentation, NCCL's own buffers, short-lived operands of "
    "single operations.";

}  // namespace

void add_plan_memory_command(CLI::App& plan) {
  auto arguments = std::make_shared<MemoryArguments>();
  CLI::App* const command =
      plan.add_subcommand("memory", "Compute the memory of one rank of each pipeline stage");
  add_config_options(*command, arguments->config_path, arguments->overrides);
  add_optional_world_size(*command, arguments->world_size);
  command->add_flag("--json", arguments->json, "Print one JSON document");
  command->footer(kMemoryFooter);
  command->callback([command, arguments] { plan_memory_of(*command, *arguments); });
}

}  // namespace lockstep
