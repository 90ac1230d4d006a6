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

/// Compares runs by one field; the loss is shown with the validation loss, dashed. FileError if a
/// run cannot be read, or if no run has a training iteration. ConfigError if no run has the field;
/// it lists the existing fields.
Plot plot_runs(const PlotOptions& options);

/// The picture that a run leaves at its end: writes loss.svg of run_files() from metrics.jsonl.
/// Throws as plot_runs() does, and FileError if it cannot be written.
void write_loss_svg(const std::string& folder);

}  // namespace lockstep
