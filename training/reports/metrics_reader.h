#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

class InputFile;

/// A number of one line of metrics.jsonl, and where in the run it stands.
struct MetricsPoint {
  int64_t iteration = 0;
  double tokens = 0;   ///< trained on, from the file's first iteration to this one
  double seconds = 0;  ///< of all iterations until then; without validations and checkpoints
  double value = 0;    ///< NaN where the line has null: the number was not finite
};

/// What is known of a run.
struct RunMetrics {
  /// By the names that were asked for; a field that no line has is not there. Iterations grow.
  std::map<std::string, std::vector<MetricsPoint>, std::less<>> series;
  int64_t iterations = 0;             ///< lines of training iterations
  int64_t last_iteration = 0;         ///< 0: there is none
  std::string last_line;              ///< of the last training iteration
  std::string last_validation;        ///< likewise
  int64_t lines_without_metrics = 0;  ///< that were skipped

  /// An empty list where no line has the field.
  const std::vector<MetricsPoint>& of(std::string_view field) const;
};

/// Reads a metrics.jsonl while a run writes it. A torn last line waits for its end. Lines that are
/// not metrics are skipped. Where iterations come again, as after a resume, the later lines count.
class MetricsReader {
 public:
  /// `fields` are keys of a line, of an object inside it with a dot: "time_ms.forward".
  MetricsReader(std::string path, std::vector<std::string> fields);

  /// Reads the lines that were added since the last call; all lines where the file was replaced or
  /// cut. Returns whether anything changed. FileError where it cannot be read or is not there.
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
  int64_t position_ = 0;     ///< behind the last whole line
  std::string last_whole_;   ///< that line
  std::string torn_;         ///< what stands behind it
};

/// The metrics of a run: of its folder, or of a metrics file. FileError names what is missing.
RunMetrics read_run_metrics(const std::string& run, const std::vector<std::string>& fields);

/// The metrics file of `run`: itself, or metrics.jsonl in it where it is a folder.
std::string metrics_path(const std::string& run);

/// The names of all numbers of a line, in its order: "lm_loss", "time_ms.forward". Empty where it
/// is not a line of metrics.
std::vector<std::string> numeric_fields(std::string_view line);

}  // namespace lockstep
