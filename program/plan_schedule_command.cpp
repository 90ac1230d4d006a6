#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>

#include "lockstep/core/check.h"
#include "lockstep/core/counted.h"
#include "lockstep/datasets/unfinished_file.h"
#include "lockstep/pipeline/schedule_check.h"
#include "lockstep/pipeline/timeline_svg.h"
#include "lockstep/program/output_file.h"
#include "lockstep/program/plan_arguments.h"

namespace lockstep {
namespace {

struct ScheduleArguments {
  ScheduleOptions options;
  std::string svg;
  bool json = false;
};

std::vector<std::string> names_of(const std::vector<PipelineTask>& tasks) {
  std::vector<std::string> names;
  for (const PipelineTask& task : tasks) names.push_back(to_string(task));
  return names;
}

void write_schedule_json(const PipelineSchedule& schedule, const Timeline& timeline) {
  const double bubble = timeline.bubble_fraction();
  nlohmann::ordered_json json = {{"warmup", schedule.warmup}, {"bubble_fraction", bubble}};
  if (bubble == 0) json["bubble_fraction"] = 0;
  json["ranks"] = nlohmann::ordered_json::array();
  for (const auto& tasks : schedule.ranks) json["ranks"].push_back(names_of(tasks));
  std::cout << json.dump() << "\n";
}

/// "1f1b: 4 ranks x 2 chunks, 8 micro-batches in groups of 4, bubble 15.79 % of 57/2 forwards"
std::string summary(const ScheduleOptions& options, const Timeline& timeline) {
  std::string text =
      fmt::format("{}{}: pipeline {}", options.virtual_pipeline > 1 ? "interleaved " : "",
                  to_string(options.family), options.pipeline);
  if (options.virtual_pipeline > 1) text += fmt::format(" x {} chunks", options.virtual_pipeline);
  text += ", " + counted(options.microbatches, "micro-batch");
  if (options.virtual_pipeline > 1) text += fmt::format(" in groups of {}", options.group_size());
  const double makespan =
      static_cast<double>(timeline.makespan()) / static_cast<double>(options.virtual_pipeline);
  return text + fmt::format("; the step takes {:.6g} forwards, bubble {:.2f} %", makespan,
                            100 * timeline.bubble_fraction());
}

void write_schedule_text(const ScheduleOptions& options, const PipelineSchedule& schedule,
                         const Timeline& timeline) {
  const std::vector<int64_t> alive = peak_live_microbatches(schedule);
  std::cout << summary(options, timeline) << "\n"
            << fmt::format("{:>4}  {:>7}  {:>5}  tasks\n", "rank", "warm-up", "alive");
  for (size_t rank = 0; rank < schedule.ranks.size(); ++rank)
    std::cout << fmt::format("{:>4}  {:>7}  {:>5}  {}\n", rank, schedule.warmup[rank], alive[rank],
                             fmt::join(names_of(schedule.ranks[rank]), " "));
}

void write_svg(const ScheduleArguments& arguments, const PipelineSchedule& schedule,
               const Timeline& timeline) {
  std::ostringstream text;
  write_timeline_svg(text, summary(arguments.options, timeline), schedule, timeline);
  write_output_file(arguments.svg, text.view());
}

void plan_schedule(const CLI::App& command, const ScheduleArguments& arguments) {
  if (!arguments.svg.empty()) check_apart_from_output("--svg", arguments.svg);
  PipelineSchedule schedule;
  try {
    schedule = make_schedule(arguments.options);
  } catch (const ConfigError& error) {
    fail<ConfigError>("{}", with_option_names(command, error.what()));
  }
  const Timeline timeline = simulate(schedule, reference_cost(schedule));
  if (!arguments.svg.empty()) write_svg(arguments, schedule, timeline);
  if (arguments.json)
    write_schedule_json(schedule, timeline);
  else
    write_schedule_text(arguments.options, schedule, timeline);
  flush_output(command);
}

void add_family_option(CLI::App& command, ScheduleOptions& options) {
  std::map<std::string, ScheduleFamily> families;
  for (const auto family :
       {ScheduleFamily::one_f_one_b, ScheduleFamily::gpipe, ScheduleFamily::zb_h1})
    families[to_string(family)] = family;
  const auto check = [families](const std::string& text) {
    return families.count(text) != 0 ? ""
                                     : fmt::format("found '{}', allowed: 1f1b, gpipe, zb-h1", text);
  };
  command
      .add_option_function<std::string>(
          "--schedule",
          [families, &options](const std::string& text) { options.family = families.at(text); },
          "1f1b (the default, interleaved with several chunks), gpipe, or zb-h1, which splits "
          "backward")
      ->type_name("1f1b|gpipe|zb-h1")
      ->check(check);
}

constexpr const char* kScheduleFooter =
    "Tasks: Fm.c is the forward of micro-batch m through model chunk c of the rank, Bm.c its "
    "backward. With zb-h1, Bm.c computes the gradient of the input and Wm.c that of the weights.\n"
    "With --virtual V > 1: --pipeline must be > 1; the group size must be from --pipeline to "
    "--microbatches; the last group must be as large as the others, or at least --pipeline.\n"
    "Times: a forward takes 1/V, a backward 2/V (with zb-h1, each part takes 1/V), and transfers "
    "take no time.\n"
    "JSON: warmup (forwards of each rank before its first forward-backward pair), bubble_fraction "
    "(idle time over pipeline x duration), ranks (tasks in order). The text output also shows the "
    "maximum number of micro-batches whose activations are alive at the same time, counted by "
    "chunk.";

}  // namespace

void add_plan_schedule_command(CLI::App& plan) {
  auto arguments = std::make_shared<ScheduleArguments>();
  CLI::App* const command = plan.add_subcommand(
      "schedule", "Show a pipeline schedule: the tasks of each rank in order, and idle time");
  ScheduleOptions& options = arguments->options;
  const auto add = [&](const char* name, auto& value, const char* meaning) {
    return command->add_option(name, value, meaning)->check(check_integer);
  };
  add("--pipeline", options.pipeline, "Number of ranks in the pipeline")->required();
  add("--virtual", options.virtual_pipeline, "Number of model chunks on each rank")
      ->capture_default_str();
  add("--microbatches", options.microbatches,
      "Number of micro-batches of each data-parallel rank in one step")
      ->required();
  add("--microbatch-group-size", options.microbatch_group_size,
      "Number of micro-batches that run through one chunk before the next chunk; unset: the value "
      "of --pipeline");
  add_family_option(*command, options);
  command->add_option("--svg", arguments->svg, "Draw the timeline as an SVG file")
      ->type_name("FILE")
      ->check(check_path);
  command->add_flag("--json", arguments->json, "Print one JSON document");
  command->footer(kScheduleFooter);
  command->callback([command, arguments] { plan_schedule(*command, *arguments); });
}

}  // namespace lockstep
