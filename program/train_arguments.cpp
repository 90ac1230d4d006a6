#include "lockstep/program/train_arguments.h"

#include <algorithm>
#include <cstddef>

#include "lockstep/core/config_io.h"
#include "lockstep/program/argument_checks.h"
#include "lockstep/program/commands.h"

namespace lockstep {

void add_train_options(CLI::App& command, TrainArguments& arguments) {
  add_config_options(command, arguments.config_path, arguments.overrides);
  command
      .add_option("--output", arguments.output,
                  "Folder for metrics.jsonl, config.textproto (the effective configuration), "
                  "loss.svg (at the end) and, unless checkpoint.save names another, the "
                  "checkpoints. Without this option, none of them is written. The metrics.jsonl "
                  "of another run is kept as metrics.previous.jsonl, metrics.previous.2.jsonl "
                  "and so on")
      ->check(check_path);
  command
      .add_option_function<std::string>(
          "--task",
          [&arguments, set = command.get_option("--set")](const std::string& task) {
            // Options that are read at once may be repeated.
            if (!arguments.task.empty()) throw CLI::ArgumentMismatch::AtMost("--task", 1, 2);
            arguments.task = task;
            arguments.overrides_before_task = set->count();
          },
          "Short for --set train.task=TASK: pretrain or sft")
      ->type_name("TASK")
      ->trigger_on_parse();
  command.add_flag("--print-config", arguments.print_config,
                   "Print the effective configuration, defaults included, and exit");
  command
      .add_option("--profile", arguments.profile,
                  "Record iterations FIRST to LAST with libtorch's profiler: each rank writes "
                  "OUTPUT/traces/rank_R.json for ui.perfetto.dev; `lockstep trace merge` merges "
                  "them into one")
      ->type_name("FIRST:LAST")
      ->check([](const std::string& text) -> std::string {
        return text.empty() ? "found '', allowed: FIRST:LAST, as in 5:7" : "";
      });
  command.add_flag(
      "--audit", arguments.audit,
      "Before the first iteration, measure which ranks' gradients contribute to each parameter, "
      "and with which factor, by sending integers in place of gradients. End with an error if the "
      "result differs from `lockstep plan audit`. Write OUTPUT/audit.json");
}

Config load_train_config(const TrainArguments& arguments) {
  std::vector<std::string> overrides = arguments.overrides;
  if (!arguments.task.empty())
    overrides.insert(overrides.begin() + static_cast<std::ptrdiff_t>(std::min(
                                             arguments.overrides_before_task, overrides.size())),
                     "train.task=" + arguments.task);
  return load_config(arguments.config_path, overrides);
}

}  // namespace lockstep
