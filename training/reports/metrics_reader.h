#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

class InputFile;

/// A number from one line of metrics.jsonl, and its place in the run.
struct MetricsPoint {
  int64_t iteration = 0;
  double tokens = 0;   ///< trained on, from the file's first iteration to this one
  double seconds = 0;  ///< of all iterations so far; without validations and checkpoints
  double value = 0;    ///< NaN if the line has null: the number was not finite
};

/// The metrics of a run.
struct RunMetrics {
  /// The points by the requested names; a field that no line has is missing. Iterations increase.
  std::map<std::string, std::vector<MetricsPoint>, std::less<>> series;
  int64_t iterations = 0;             ///< lines of training iterations
  int64_t last_iteration = 0;         ///< 0: there is none
  std::string last_line;              ///< of the last training iteration
  std::string last_validation;        ///< likewise
  int64_t lines_without_metrics = 0;  ///< that were skipped

  /// An empty list if no line has the field.
  const std::vector<MetricsPoint>& of(std::string_view field) const;
};

/// Reads a metrics.jsonl while a run writes it. A torn last line is read once it is complete. Lines
/// that are not metrics are skipped. If iterations are repeated, as after a resume, the later lines
/// count.
class MetricsReader {
 public:
  /// `fields` are keys of a line; a key of an object inside it is written with a dot:
  /// "time_ms.forward".
  MetricsReader(std::string path, std::vector<std::string> fields);

  /// Reads the lines that were added since the last call, or all lines if the file was replaced or
  /// truncated. Returns whether anything changed. FileError if it cannot be read or does not exist.
  bool read_more();

  const RunMetrics& metrics() const { return metrics_; }
  const std::string& path() const { return path_; }

 private:
  struct Step {
    int64_t iteration;
    double tokens, seconds;
  };

  bool was_replaced(const InputFile& file) const;
  void take(std::string_view line);
  void drop_from(int64_t iteration);

  std::string path_;
  std::vector<std::string> fields_;
  RunMetrics metrics_;
  std::vector<Step> steps_;  ///< of the training iterations
  int64_t position_ = 0;     ///< after the last whole line
  std::string last_whole_;   ///< that line
  std::string torn_;         ///< what follows it
};

/// The metrics of a run, given its folder or a metrics file. FileError names what is missing.
RunMetrics read_run_metrics(const std::string& run, const std::vector<std::string>& fields);

/// The metrics file of `run`: `run` itself, or metrics.jsonl in it if it is a folder.
std::string metrics_path(const std::string& run);

/// The names of all numbers of a line, in its order: "lm_loss", "time_ms.forward". Empty if it is
/// not a line of metrics.
std::vector<std::string> numeric_fields(std::string_view line);

}  // namespace lockstep
