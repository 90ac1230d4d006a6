#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace lockstep {

/// What one training iteration gave. Equal on all ranks, apart from the times.
struct IterationMetrics {
  int64_t iteration = 0;  ///< from 1
  double lm_loss = 0;     ///< nats, mean over every token of the global batch
  double grad_norm = 0;   ///< before clipping
  double learning_rate = 0;
  int64_t consumed_samples = 0;  ///< sequences, this iteration's included
  int64_t num_tokens = 0;        ///< of the global batch
  double iteration_ms = 0;
  double tokens_per_second = 0;  ///< of all ranks together
  bool skipped = false;          ///< the gradient was not finite, so nothing was updated
  /// Of the gradient, with optimizer.log_num_zeros_in_grad.
  std::optional<int64_t> num_zeros_in_grad = {};
  double loss_scale = 1;  ///< of this iteration; written where it is not 1
  /// Of word embeddings and output layer, with optimizer.decoupled_lr.
  std::optional<double> decoupled_learning_rate = {};
};

/// What one validation gave.
struct ValidationMetrics {
  int64_t iteration = 0;       ///< after which it was made
  double validation_loss = 0;  ///< nats, mean over tokens
  double perplexity = 0;       ///< exp(validation_loss)
};

/// One line of metrics.jsonl, without the newline. Numbers keep full precision; one that is not
/// finite is null, as JSON has no such number.
std::string to_json(const IterationMetrics& metrics);
std::string to_json(const ValidationMetrics& metrics);

/// Writes metrics.jsonl, each line whole and at once, so that a reader can follow the run.
class MetricsFile {
 public:
  /// Begins `folder`/metrics.jsonl; makes the folder. A file of an earlier run is kept as
  /// metrics.previous.jsonl. A run that goes on from a checkpoint after `resumed` iterations
  /// appends: lines of later iterations, which come again, and a torn last line are removed.
  /// A link in the place of the file is not followed. FileError names what cannot be read or
  /// written; what was there is still there then.
  explicit MetricsFile(const std::string& folder, int64_t resumed = 0);
  ~MetricsFile();
  MetricsFile(const MetricsFile&) = delete;
  MetricsFile& operator=(const MetricsFile&) = delete;

  /// FileError with the path and the system's reason.
  void write(const std::string& line);

 private:
  void keep_lines_until(int64_t iteration) const;
  [[noreturn]] void fail_to_write() const;

  std::string path_;
  int file_ = -1;
};

}  // namespace lockstep
