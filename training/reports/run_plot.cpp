#include "lockstep/training/run_plot.h"

#include <algorithm>
#include <filesystem>
#include <sstream>

#include "lockstep/core/check.h"
#include "lockstep/datasets/unfinished_file.h"
#include "lockstep/training/line_chart.h"
#include "lockstep/training/metrics_reader.h"
#include "lockstep/training/run_files.h"

namespace lockstep {
namespace {

constexpr std::string_view kLossField = "lm_loss", kValidationField = "validation_loss";

std::vector<CurvePoint> points_of(const std::vector<MetricsPoint>& series, PlotX x) {
  std::vector<CurvePoint> points;
  points.reserve(series.size());
  for (const MetricsPoint& point : series)
    points.push_back({x == PlotX::tokens    ? point.tokens
                      : x == PlotX::seconds ? point.seconds
                                            : static_cast<double>(point.iteration),
                      point.value});
  return points;
}

const char* label_of(PlotX x) {
  if (x == PlotX::tokens) return "tokens";
  return x == PlotX::seconds ? "seconds of training" : "iteration";
}

std::string label_of_field(const std::string& field) {
  return field == kLossField ? "loss (nats per token)" : field;
}

/// "runs/tiny" for "runs/tiny/" and for "runs/tiny/metrics.jsonl".
std::string name_of_run(const std::string& run) {
  std::filesystem::path path(run);
  if (path.filename() == "metrics.jsonl" && path.has_parent_path()) path = path.parent_path();
  if (!path.has_filename() && path.has_parent_path()) path = path.parent_path();
  return path.string();
}

std::string title_of(const std::string& field, const std::vector<ChartLine>& lines) {
  if (field != kLossField) return field;
  const bool validated =
      std::any_of(lines.begin(), lines.end(), [](const ChartLine& line) { return line.dashed; });
  return validated ? "Loss (dashed: validation)" : "Loss";
}

class RunCollection {
 public:
  explicit RunCollection(const PlotOptions& options) : options_(options) {
    std::vector<std::string> fields = {options.field};
    if (options.field == kLossField) fields.emplace_back(kValidationField);
    for (const std::string& run : options.runs) add(run, read_run_metrics(run, fields));
  }

  Plot plot() {
    require<FileError>(!known_.empty(), "'{}': found no training iteration",
                       fmt::join(options_.runs, "', '"));
    require<ConfigError>(!chart_.lines.empty(), "--field: found '{}', allowed: {}", options_.field,
                         fmt::join(known_, ", "));
    chart_.title = title_of(options_.field, chart_.lines);
    chart_.x_label = label_of(options_.x);
    chart_.y_label = label_of_field(options_.field);
    chart_.logarithmic = options_.logarithmic;
    std::ostringstream svg;
    write_line_chart_svg(svg, chart_);
    return {svg.str(), std::move(notes_)};
  }

 private:
  void add(const std::string& run, const RunMetrics& metrics) {
    if (metrics.lines_without_metrics > 0)
      notes_.push_back(fmt::format("'{}': skipped {} lines that are not metrics", run,
                                   metrics.lines_without_metrics));
    for (const std::string& line : {metrics.last_line, metrics.last_validation})
      for (const std::string& field : numeric_fields(line))
        if (std::find(known_.begin(), known_.end(), field) == known_.end()) known_.push_back(field);
    const auto& values = metrics.of(options_.field);
    if (values.empty()) {
      notes_.push_back(fmt::format("'{}': left out, it has no {}", run, options_.field));
      return;
    }
    const std::string name = name_of_run(run);
    chart_.lines.push_back({name, points_of(values, options_.x),
                            /*dashed=*/options_.field == kValidationField});
    if (options_.field != kLossField) return;
    const auto& validation = metrics.of(kValidationField);
    if (!validation.empty())
      chart_.lines.push_back({name, points_of(validation, options_.x), /*dashed=*/true});
  }

  const PlotOptions& options_;
  LineChart chart_;
  std::vector<std::string> known_;
  std::vector<std::string> notes_;
};

}  // namespace

Plot plot_runs(const PlotOptions& options) { return RunCollection(options).plot(); }

void write_loss_svg(const std::string& folder) {
  write_output_file(run_files(folder).loss_svg, plot_runs({.runs = {folder}}).svg);
}

}  // namespace lockstep
