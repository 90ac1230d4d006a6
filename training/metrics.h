#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/step_parts.h"
#include "lockstep/training/rank_comparison.h"
#include "lockstep/training/spikes.h"
#include "lockstep/training/tensorboard_file.h"

namespace lockstep {

struct NamedNumber {
  std::string name;
  double value = 0;
};

/// The results of one training iteration. Equal on all ranks, except times, memory and groups.
struct IterationMetrics {
  int64_t iteration = 0;  ///< from 1
  double lm_loss = 0;     ///< nats, mean over the tokens of the global batch
  double grad_norm = 0;   ///< before clipping
  double learning_rate = 0;
  int64_t consumed_samples = 0;  ///< sequences, including this iteration's
  int64_t num_tokens = 0;        ///< of the global batch
  /// The tokens over which lm_loss is the mean, if they are fewer.
  std::optional<int64_t> num_loss_tokens = {};
  double iteration_ms = 0;
  double tokens_per_second = 0;  ///< of all ranks together
  bool skipped = false;          ///< nothing was updated; see reason_of_skip()
  /// With train.on_spike: the spike for which the update was skipped.
  Spike spike = Spike::none;
  /// Zeros of the gradient, with optimizer.log_num_zeros_in_grad.
  std::optional<int64_t> num_zeros_in_grad = {};
  double loss_scale = 1;  ///< of this iteration; written if it is not 1
  /// The learning rate of word embeddings and output layer, with optimizer.decoupled_lr.
  std::optional<double> decoupled_learning_rate = {};
  /// This rank's times, with train.log_step_times; they add up to iteration_ms.
  std::optional<StepTimes> times = {};
  /// Operations of the model (see model_flops_per_token()) on each device, in TFLOP/s.
  std::optional<double> model_tflops_per_device = {};
  std::optional<double> utilisation = {};  ///< that as a share of the device's peak
  /// See memory_use(); of this rank, after the iteration.
  std::optional<int64_t> memory_bytes = {}, peak_memory_bytes = {};
  /// The rate of each parameter group of this rank, by name, if there are several.
  std::vector<NamedNumber> learning_rates = {};
  /// The norm of each parameter group of the model, with train.log_grad_norm_per_group.
  std::vector<NamedNumber> grad_norms = {};
  /// The slowest rank over the iterations since the last one that had this field.
  std::optional<SlowestRank> slowest_rank = {};
};

/// The results of one validation.
struct ValidationMetrics {
  int64_t iteration = 0;       ///< after which it ran
  double validation_loss = 0;  ///< nats, mean over tokens
  double perplexity = 0;       ///< exp(validation_loss)
};

/// The results of the test of a finished run.
struct TestMetrics {
  int64_t iteration = 0;       ///< the last of the run
  double test_loss = 0;        ///< nats, mean over tokens
  double test_perplexity = 0;  ///< exp(test_loss)
};

/// One line of metrics.jsonl, without the newline. Numbers keep full precision; one that is not
/// finite is written as null, because JSON has no such number.
std::string to_json(const IterationMetrics& metrics);
std::string to_json(const ValidationMetrics& metrics);
std::string to_json(const TestMetrics& metrics);

/// The numbers of such a line for TensorBoard, "train/lm_loss", "train/time_ms/forward",
/// "validation/perplexity", "test/test_loss": all but the iteration and slowest_rank.
std::vector<Scalar> to_scalars(const IterationMetrics& metrics);
std::vector<Scalar> to_scalars(const ValidationMetrics& metrics);
std::vector<Scalar> to_scalars(const TestMetrics& metrics);

/// Distinguishes a line of metrics.jsonl from all others: because of its times, no two runs write
/// the same line.
uint32_t checksum_of_line(std::string_view line);

/// The point from which a run continues.
struct MetricsResume {
  int64_t iteration = 0;  ///< of its checkpoint; 0: it starts from scratch
  /// checksum_of_line() of that iteration, according to the checkpoint. Without it metrics.jsonl is
  /// assumed to be the run's.
  std::optional<uint32_t> checksum = {};
};

/// Writes metrics.jsonl, each line whole and at once, so that a reader can follow the run. The file
/// holds the lines of one run from its start on, over any number of resumes. Files of other runs
/// are kept as metrics.previous.jsonl, metrics.previous.2.jsonl and so on; the latest one has the
/// highest number.
class MetricsFile {
 public:
  /// Begins `folder`/metrics.jsonl; makes the folder. A run that starts from scratch puts an
  /// existing file aside. A run that resumes appends: it removes lines of later iterations, which
  /// will be repeated, and a torn last line. If the file belongs to another run, it is put aside,
  /// and the run's lines are copied from the latest file that has them. A run that began with
  /// another run's checkpoint and begins with it again cannot tell whose lines these are, and puts
  /// them aside, too. A link in place of the file is not followed. FileError names what cannot be
  /// read or written; what was there is then still there, under its name or put aside.
  explicit MetricsFile(const std::string& folder, const MetricsResume& resume = {});
  ~MetricsFile();
  MetricsFile(const MetricsFile&) = delete;
  MetricsFile& operator=(const MetricsFile&) = delete;

  /// A note to the user about files that were put aside; empty if there is nothing.
  const std::string& note() const { return note_; }

  /// The following throw FileError with the path and the system's reason.
  void write(const std::string& line);
  /// Returns when what was written is on disk. Call it before a checkpoint is saved: a run that
  /// resumes there looks for the line of its iteration.
  void sync();
  /// Removes the lines of later iterations, which will be repeated: the run goes back to the state
  /// after this one.
  void go_back(int64_t iteration);

 private:
  void open();
  void go_on(const MetricsResume& resume);
  /// Returns the new path of the file; empty if there was none, or none with a line.
  std::string put_aside() const;
  void replace_by(const std::string& lines) const;
  [[noreturn]] void fail_to_write() const;

  std::string path_;
  std::string note_;
  int file_ = -1;
  bool name_is_synced_ = false;
};

}  // namespace lockstep
