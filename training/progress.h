#pragma once

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>

#include "lockstep/training/metrics.h"
#include "lockstep/training/quantity_text.h"

namespace lockstep {

/// The data that the progress line shows besides an iteration's metrics.
struct ProgressStatus {
  int64_t train_iters = 0;
  int64_t memory_bytes = 0;  ///< of this process, or of its CUDA device
  double seconds_left = 0;
};

/// "iteration  120/600 | loss 2.4310 | grad norm 0.812 | lr 1.200e-03 | 35.1k tokens/s | 412 MiB |
/// 0:42 left", and, after the learning rate, that of the embeddings if they have their own. If it
/// is longer than `columns`, it leaves out memory, learning rate, gradient norm and tokens/s, in
/// this order, until it fits.
std::string progress_line(const IterationMetrics& metrics, const ProgressStatus& status,
                          size_t columns = std::string::npos);

/// Shows how training goes: on a terminal one line that is overwritten, elsewhere a plain line
/// every `log_interval` iterations and for the first one of this start and the last one.
class ProgressDisplay {
 public:
  /// `columns`: the present width of the terminal; empty if `out` is none.
  ProgressDisplay(std::ostream& out, std::function<int()> columns, int64_t train_iters,
                  int64_t log_interval);

  void iteration(const IterationMetrics& metrics, int64_t memory_bytes);
  void validation(const ValidationMetrics& metrics);
  void test(const TestMetrics& metrics);
  /// A line of its own.
  void message(const std::string& text);

 private:
  std::ostream& out_;
  std::function<int()> columns_;
  int64_t train_iters_;
  int64_t log_interval_;
  /// The first iteration, which also sets things up, counts only until there is a second one.
  void note_time(double ms);

  int64_t seen_ = 0;             ///< iterations of this start
  double ms_per_iteration_ = 0;  ///< smoothed
  double weight_ = 0;            ///< of the smoothed iterations, below 1
  bool line_open_ = false;
};

}  // namespace lockstep
