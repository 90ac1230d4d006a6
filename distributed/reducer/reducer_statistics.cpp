#include "lockstep/distributed/reducer_statistics.h"

#include <algorithm>
#include <chrono>

#include "lockstep/core/check.h"

namespace lockstep {

std::string ReducerLoggingData::to_string() const {
  std::string text;
  for (const auto& [name, value] : strings) text += fmt::format("{}: {}\n", name, value);
  for (const auto& [name, value] : integers) text += fmt::format("{}: {}\n", name, value);
  for (const ReducerBucketTimes& bucket : buckets)
    text += fmt::format("{}: {} bytes, launched {}, finished {}, overlap {} ns\n", bucket.label,
                        bucket.bytes, bucket.launched, bucket.finished, bucket.overlap);
  return text;
}

int64_t ReducerStatistics::now() {
  using std::chrono::duration_cast, std::chrono::nanoseconds, std::chrono::steady_clock;
  return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

void ReducerStatistics::begin_forward(int64_t iteration) {
  samples_forward_ = iteration <= 10 || iteration % sample_rate_ == 0;
  if (!samples_forward_) return;
  time_ = {};
  time_[forward_start] = now();
}

void ReducerStatistics::begin_backward(size_t params, size_t buckets) {
  sampled_ = samples_forward_;
  if (!sampled_) return;
  time_[backward_start] = now();
  ready_.assign(params, 0);
  launched_.assign(buckets, 0);
  finished_.assign(buckets, 0);
}

void ReducerStatistics::launched(size_t bucket) {
  const int64_t time = now();
  if (time_[comm_start] == 0) time_[comm_start] = time;
  if (launched_.size() <= bucket) launched_.resize(bucket + 1);
  launched_[bucket] = time - time_[backward_start];
}

void ReducerStatistics::finished(size_t bucket) {
  time_[comm_end] = now();
  if (finished_.size() <= bucket) finished_.resize(bucket + 1);
  finished_[bucket] = time_[comm_end] - time_[backward_start];
}

int64_t ReducerStatistics::overlap_of(size_t bucket) const {
  const int64_t end = std::min(finished_at(bucket), time_[backward_end] - time_[backward_start]);
  return std::max<int64_t>(0, end - launched_at(bucket));
}

ReducerStatistics::Durations ReducerStatistics::durations() const {
  Durations d;
  d.forward = time_[backward_start] - time_[forward_start];
  d.backward = time_[backward_end] - time_[backward_start];
  d.comm = time_[comm_end] - time_[comm_start];
  d.overlap =
      std::max<int64_t>(0, std::min(time_[backward_end], time_[comm_end]) - time_[comm_start]);
  return d;
}

void ReducerStatistics::end_iteration() {
  last_ = durations();
  sum_.forward += last_.forward;
  sum_.backward += last_.backward;
  sum_.comm += last_.comm;
  sum_.overlap += last_.overlap;
  ++samples_;
}

std::map<std::string, int64_t> ReducerStatistics::fields() const {
  const int64_t n = std::max<int64_t>(samples_, 1);
  return {{"forward_compute_time", last_.forward},
          {"backward_compute_time", last_.backward},
          {"backward_comm_time", last_.comm},
          {"backward_compute_comm_overlap_time", last_.overlap},
          {"avg_forward_compute_time", sum_.forward / n},
          {"avg_backward_compute_time", sum_.backward / n},
          {"avg_backward_comm_time", sum_.comm / n},
          {"avg_backward_compute_comm_overlap_time", sum_.overlap / n},
          {"forward_compute_time_start", time_[forward_start]},
          {"backward_compute_time_start", time_[backward_start]},
          {"backward_compute_time_end", time_[backward_end]},
          {"backward_comm_time_start", time_[comm_start]},
          {"backward_comm_time_end", time_[comm_end]}};
}

}  // namespace lockstep
