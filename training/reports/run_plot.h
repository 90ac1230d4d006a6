#pragma once

#include <string>
#include <vector>

namespace lockstep {

enum class PlotX { iteration, tokens, seconds };

struct PlotOptions {
  std::vector<std::string> runs;  ///< folders of runs, or metrics files
  std::string field = "lm_loss";  ///< "time_ms.forward" is one inside an object
  PlotX x = PlotX::iteration;
  bool logarithmic = false;
};

struct Plot {
  std::string svg;
  std::vector<std::string> notes;  ///< runs that were left out, lines that are not metrics
};

/// Compares runs by one field; beside the loss stands the validation loss, dashed. FileError: a run
/// that cannot be read, or all without a training iteration. ConfigError: a field that no run has,
/// with those that there are.
Plot plot_runs(const PlotOptions& options);

/// The picture that a run leaves at its end: writes loss.svg of run_files() from metrics.jsonl.
/// Throws as plot_runs(), and FileError where it cannot be written.
void write_loss_svg(const std::string& folder);

}  // namespace lockstep
