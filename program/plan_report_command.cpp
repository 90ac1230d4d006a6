#include <iostream>
#include <memory>
#include <sstream>

#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/core/counted.h"
#include "lockstep/datasets/unfinished_file.h"
#include "lockstep/parallel_state/job_program.h"
#include "lockstep/planner/job_report.h"
#include "lockstep/planner/machine.h"
#include "lockstep/program/commands.h"
#include "lockstep/program/named_configs.h"
#include "lockstep/program/plan_arguments.h"
#include "lockstep/training/planned_job.h"

namespace lockstep {
namespace {

struct ReportArguments {
  std::string config_path;
  std::vector<std::string> overrides;
  std::optional<int64_t> world_size;
  int64_t ranks_per_host = 8;
  std::string machine_path;
  bool json = false;
  std::string html;
};

JobReport report_of(const CLI::App& command, const ReportArguments& arguments) {
  const Config config = load_config(arguments.config_path, arguments.overrides);
  const bool timed = !arguments.machine_path.empty();
  const Machine machine = timed ? load_machine(machine_file(arguments.machine_path)) : Machine();
  try {
    const JobProgram program = record_job(config, *arguments.world_size, timed);
    JobReport report = make_job_report(
        fmt::format("{} on {}", arguments.config_path, counted(*arguments.world_size, "rank")),
        config, program, timed ? machine.ranks_per_host : arguments.ranks_per_host);
    if (timed) report.time = plan_time(config, program, machine);
    return report;
  } catch (const ConfigError& error) {
    fail<ConfigError>("{}", with_option_names(command, error.what()));
  }
}

void report_plan(const CLI::App& command, const ReportArguments& arguments) {
  if (arguments.config_path.empty()) {
    if (command.parse_order().empty()) throw CLI::RequiredError("A subcommand");
    throw CLI::RequiredError("CONFIG");
  }
  if (!arguments.world_size) throw CLI::RequiredError("--world-size");
  const JobReport report = report_of(command, arguments);
  if (!arguments.html.empty()) {
    std::ostringstream page;
    write_page(page, report);
    write_output_file(arguments.html, page.view());
  } else if (arguments.json) {
    write_json(std::cout, report);
  } else {
    write_text(std::cout, report);
  }
  flush_output(command);
}

/// What stands before a command inside `plan` would be the report's, which is not asked for.
void refuse_before(const CLI::App& plan, const CLI::App& command) {
  if (plan.parse_order().empty() || plan.get_help_ptr()->count() > 0) return;
  const CLI::Option& first = *plan.parse_order().front();
  const bool is_config = first.get_positional();
  const std::string found = is_config ? first.results().front() : first.get_name();
  const std::string name = command.get_name(), path = "lockstep plan " + name;
  std::string allowed = "after it";
  if (command.get_option_no_throw(first.get_name()) == nullptr)
    allowed =
        fmt::format("none, because `{}` takes no {}", path, is_config ? "configuration" : found);
  else if (is_config)
    allowed += fmt::format(", as in `{} {}`", path, found);
  fail<ConfigError>("plan: found '{}' before {}, allowed: {}", found, name, allowed);
}

constexpr const char* kReportFooter =
    "`lockstep plan CONFIG --world-size N` prints a report of the job: groups, gradient buffers "
    "and buckets, the pipeline's schedule, memory of each stage, and the bytes that all ranks send "
    "in one training step, inside and between hosts. The bytes are those of the recorded program "
    "of `lockstep train` (see `lockstep plan verify --help`); collectives are counted as rings.\n"
    "JSON: job, world_size, ranks_per_host, hosts, parameters, flops_of_step; groups (count and "
    "size of each kind); buffers (stage, chunk, group, ranks: how many it has, with several "
    "optimizer instances those of one; parameters, numel, buckets as pairs "
    "of start and end); schedule (family, pipeline, virtual_pipeline, microbatches, "
    "bubble_fraction, warmup, alive); memory (like stages of `plan memory`, plus "
    "recorded_peak_bytes: peak memory of the tensors of a rank in the recorded program); links "
    "(inside_bytes, between_bytes, and for each of groups: group, ranks, operations, inside_bytes, "
    "between_bytes, most_of_a_rank); with --machine also time (machine, and the fields of `plan "
    "time`). With --machine the machine file sets the number of ranks per host.";

}  // namespace

void add_plan_report(CLI::App& plan) {
  auto arguments = std::make_shared<ReportArguments>();
  add_config_options(plan, arguments->config_path, arguments->overrides, /*required=*/false);
  plan.add_option("--world-size", arguments->world_size, "Number of ranks of the job")
      ->check(check_integer);
  CLI::Option* const per_host =
      plan.add_option("--ranks-per-host", arguments->ranks_per_host,
                      "Ranks per host: rank r runs on host r / N, rounded down")
          ->capture_default_str()
          ->check(check_at_least(1));
  plan.add_option(
          "--machine", arguments->machine_path,
          "Also predict the time of a step on this machine: a machine file, or the name of one "
          "in configs/machines")
      ->type_name("FILE")
      ->excludes(per_host)
      ->check(check_path);
  CLI::Option* const html =
      plan.add_option("--html", arguments->html, "Write the report to this file as one HTML page")
          ->type_name("FILE")
          ->check(check_path);
  plan.add_flag("--json", arguments->json, "Print one JSON document")->excludes(html);
  plan.footer(kReportFooter);
  plan.require_subcommand(0, 1);
  for (CLI::App* command : plan.get_subcommands([](CLI::App*) { return true; }))
    command->preparse_callback([&plan, command](size_t) { refuse_before(plan, *command); });
  plan.callback([command = &plan, arguments] {
    if (command->get_subcommands().empty()) report_plan(*command, *arguments);
  });
}

}  // namespace lockstep
