#include <iostream>
#include <memory>

#include "lockstep/core/check.h"
#include "lockstep/core/counted.h"
#include "lockstep/datasets/unfinished_file.h"
#include "lockstep/program/argument_checks.h"
#include "lockstep/program/commands.h"
#include "lockstep/program/output_file.h"
#include "lockstep/training/trace_merge.h"

namespace lockstep {
namespace {

struct TraceArguments {
  std::string folder;
  std::string output;
};

void merge(const TraceArguments& arguments) {
  const std::string output =
      arguments.output.empty() ? arguments.folder + "/merged.json" : arguments.output;
  check_apart_from_output("--output", output);
  const std::string target = behind_links(output);
  if (!arguments.output.empty()) check_output_file(target);
  const TraceMerge merged = merge_traces(arguments.folder, target);
  for (const std::string& note : merged.notes) std::cerr << note << "\n";
  std::cout << fmt::format("{}: {} of {}\n", output, counted(merged.events, "event"),
                           counted(merged.ranks, "rank"));
}

}  // namespace

void add_trace_command(CLI::App& program) {
  auto arguments = std::make_shared<TraceArguments>();
  CLI::App* const trace =
      program.add_subcommand("trace", "Process traces of `lockstep train --profile`");
  trace->require_subcommand(1);
  CLI::App* const command = trace->add_subcommand(
      "merge", "Merge the traces of all ranks into one, on one clock, for ui.perfetto.dev");
  command
      ->add_option("FOLDER", arguments->folder,
                   "Folder with rank_0.json, rank_1.json, ...: OUTPUT/traces of the run")
      ->required()
      ->check(check_path);
  command
      ->add_option("--output", arguments->output,
                   "Write the merged trace to this file; without it, to FOLDER/merged.json")
      ->type_name("FILE")
      ->check(check_path);
  command->footer(
      "Rank R becomes the process \"rank R\". Ranks of one host share its clock. The clocks of "
      "different hosts are aligned by the times at which their common collectives ended.");
  command->callback([arguments] { merge(*arguments); });
}

}  // namespace lockstep
