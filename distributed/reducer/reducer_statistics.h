#pragma once

// Internal.

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "lockstep/distributed/reducer_logging.h"

namespace lockstep {

/// Times of the iterations that are sampled: the first ten, then every n-th.
class ReducerStatistics {
 public:
  /// `rate` >= 1.
  void set_sample_rate(int64_t rate) { sample_rate_ = rate; }
  bool is_sampled() const { return sampled_; }

  void begin_forward(int64_t iteration);
  /// An iteration without forward and backward.
  void skip_iteration() { sampled_ = false; }
  void begin_backward(size_t params, size_t buckets);
  void gradient_ready(size_t param) { ready_[param] = now() - time_[backward_start]; }
  void launched(size_t bucket);
  void end_compute() { time_[backward_end] = now(); }
  void finished(size_t bucket);
  /// The iteration is over: adds it to the averages.
  void end_iteration();

  /// When each parameter got its gradient in the last sampled iteration, ns since backward began.
  const std::vector<int64_t>& ready() const { return ready_; }
  int64_t launched_at(size_t bucket) const { return bucket_times(launched_, bucket); }
  int64_t finished_at(size_t bucket) const { return bucket_times(finished_, bucket); }
  int64_t overlap_of(size_t bucket) const;
  /// The fields "forward_compute_time", "avg_...", "..._start", "..._end".
  std::map<std::string, int64_t> fields() const;

 private:
  enum Stamp { forward_start, backward_start, backward_end, comm_start, comm_end, kStamps };
  struct Durations {
    int64_t forward = 0, backward = 0, comm = 0, overlap = 0;
  };

  static int64_t now();
  static int64_t bucket_times(const std::vector<int64_t>& times, size_t bucket) {
    return bucket < times.size() ? times[bucket] : 0;
  }
  Durations durations() const;

  int64_t sample_rate_ = 100;
  bool samples_forward_ = false;
  bool sampled_ = false;
  std::array<int64_t, kStamps> time_ = {};
  std::vector<int64_t> ready_, launched_, finished_;
  int64_t samples_ = 0;
  Durations last_, sum_;
};

}  // namespace lockstep
