#include <unistd.h>

#include <iostream>
#include <map>
#include <memory>

#include "lockstep/core/check.h"
#include "lockstep/datasets/unfinished_file.h"
#include "lockstep/program/argument_checks.h"
#include "lockstep/program/commands.h"
#include "lockstep/training/run_plot.h"

namespace lockstep {
namespace {

struct PlotArguments {
  PlotOptions options;
  std::string x = "iteration";
  std::string output;
};

const std::map<std::string, PlotX>& plot_axes() {
  static const std::map<std::string, PlotX> axes = {
      {"iteration", PlotX::iteration}, {"seconds", PlotX::seconds}, {"tokens", PlotX::tokens}};
  return axes;
}

std::string check_axis(const std::string& text) {
  return plot_axes().contains(text)
             ? ""
             : fmt::format("found '{}', allowed: iteration, seconds, tokens", text);
}

void plot(PlotArguments& arguments) {
  require<ConfigError>(!arguments.output.empty() || ::isatty(STDOUT_FILENO) == 0,
                       "--output: missing, and standard output is a terminal; allowed: a file, or "
                       "standard output into a file");
  arguments.options.x = plot_axes().at(arguments.x);
  const Plot plot = plot_runs(arguments.options);
  for (const std::string& note : plot.notes) std::cerr << note << "\n";
  if (arguments.output.empty())
    std::cout << plot.svg;
  else
    write_output_file(arguments.output, plot.svg);
}

}  // namespace

void add_plot_command(CLI::App& program) {
  auto arguments = std::make_shared<PlotArguments>();
  CLI::App* const command =
      program.add_subcommand("plot", "Draw the loss of one or more runs as an SVG picture");
  command
      ->add_option("RUN", arguments->options.runs,
                   "Folder given to `lockstep train` as --output, or a metrics.jsonl; all runs are "
                   "drawn in one picture")
      ->required();
  command
      ->add_option("--output", arguments->output,
                   "Write the picture to this file; without it, to standard output")
      ->type_name("FILE")
      ->check(check_path);
  command
      ->add_option("--field", arguments->options.field,
                   "Field of metrics.jsonl to draw; time_ms.forward means a field inside an "
                   "object. lm_loss also draws the validation loss, dashed")
      ->type_name("NAME")
      ->capture_default_str();
  command
      ->add_option("--x", arguments->x,
                   "Horizontal axis: iteration, tokens, or seconds (of training, without "
                   "validations and checkpoints)")
      ->type_name("AXIS")
      ->check(check_axis)
      ->capture_default_str();
  command->add_flag("--log", arguments->options.logarithmic, "Use a logarithmic vertical axis");
  command->callback([arguments] { plot(*arguments); });
}

}  // namespace lockstep
