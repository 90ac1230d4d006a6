#include "lockstep/datasets/batch_sizes.h"

#include <algorithm>
#include <limits>

#include "lockstep/core/check.h"
#include "lockstep/core/config_rules.h"
#include "lockstep/core/integers.h"

namespace lockstep {

BatchSizes batch_sizes(const TrainConfig& config, int64_t data_parallel_size) {
  const int64_t together =
      checked_mul(config.micro_batch_size, data_parallel_size, "train.micro_batch_size");
  const auto& steps = config.step_batch_size_schedule;
  const int64_t global = steps ? parse_step_batch_size_schedule(*steps).back().global
                               : config.global_batch_size.value_or(together);
  require<ConfigError>(global % together == 0,
                       "train.{}: found {}, allowed: a multiple of {} "
                       "(train.micro_batch_size {} * {} data-parallel ranks)",
                       steps ? "step_batch_size_schedule" : "global_batch_size", global, together,
                       config.micro_batch_size, data_parallel_size);
  return {config.micro_batch_size, global, global / together};
}

BatchSchedule::BatchSchedule(const TrainConfig& config, int64_t data_parallel_size)
    : full_(batch_sizes(config, data_parallel_size)) {
  const auto require_multiple = [&](const char* field, const std::string& text, int64_t global) {
    const int64_t together = full_.micro * data_parallel_size;
    require<ConfigError>(global % together == 0,
                         "train.{}: found '{}', which has a batch of {}, allowed: multiples of {} "
                         "(train.micro_batch_size {} * {} data-parallel ranks)",
                         field, text, global, together, full_.micro, data_parallel_size);
  };
  if (config.step_batch_size_schedule) {
    for (const auto& [samples, global] :
         parse_step_batch_size_schedule(*config.step_batch_size_schedule)) {
      require_multiple("step_batch_size_schedule", *config.step_batch_size_schedule, global);
      schedule_.push_back({samples, global});
    }
  }
  if (!config.rampup_batch_size) return;
  const std::string& text = *config.rampup_batch_size;
  const BatchRampUp ramp = parse_rampup_batch_size(text);
  const int64_t growth = full_.global - ramp.start;
  require<ConfigError>(growth >= 0 && growth % ramp.increment == 0,
                       "train.rampup_batch_size: found '{}', allowed: a START of at most, and "
                       "steps of INCREMENT that lead to, the global batch of {}",
                       text, full_.global);
  increment_ = ramp.increment;
  steps_ = growth / ramp.increment;
  samples_ = ramp.samples;
  // Every batch is a multiple if two consecutive ones are.
  for (const int64_t global : {ramp.start, ramp.start + (steps_ > 0 ? increment_ : 0)})
    require_multiple("rampup_batch_size", text, global);
}

BatchSizes BatchSchedule::sized(int64_t global) const {
  return {full_.micro, global, global / (full_.global / full_.num_microbatches)};
}

BatchSizes BatchSchedule::at(int64_t consumed_samples) const {
  if (!schedule_.empty()) {
    auto step = schedule_.rbegin();
    while (step->samples > consumed_samples) ++step;
    return sized(step->global);
  }
  if (steps_ == 0 || consumed_samples > samples_) return full_;
  const double samples_per_step = static_cast<double>(samples_) / static_cast<double>(steps_);
  const auto step = static_cast<int64_t>(static_cast<double>(consumed_samples) / samples_per_step);
  return sized(full_.global - (steps_ - std::min(step, steps_)) * increment_);
}

int64_t BatchSchedule::next_change(int64_t consumed_samples) const {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  for (const Step& step : schedule_)
    if (step.samples > consumed_samples) return step.samples;
  const int64_t global = at(consumed_samples).global;
  if (global == full_.global) return kMost;
  int64_t same = consumed_samples, other = std::min(samples_, kMost - 1) + 1;
  while (other - same > 1) {
    const int64_t middle = same + (other - same) / 2;
    (at(middle).global == global ? same : other) = middle;
  }
  return other;
}

int64_t BatchSchedule::iterations_until(int64_t samples) const {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  int64_t iterations = 0;
  for (int64_t consumed = 0; consumed < samples;) {
    const int64_t global = at(consumed).global;
    const int64_t end = std::min(next_change(consumed), samples);
    const int64_t count = ceil_div(end - consumed, global);
    iterations += count;
    if (count > (kMost - consumed) / global) break;
    consumed += count * global;
  }
  return iterations;
}

int64_t BatchSchedule::iterations_for(int64_t full_batches) const {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  return full_batches > kMost / full_.global ? kMost
                                             : iterations_until(full_batches * full_.global);
}

int64_t BatchSchedule::samples_of(int64_t iterations) const {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  int64_t consumed = 0;
  while (iterations > 0) {
    const int64_t global = at(consumed).global;
    const int64_t change = next_change(consumed);
    const int64_t count =
        change == kMost ? iterations : std::min(iterations, ceil_div(change - consumed, global));
    if (count > (kMost - consumed) / global) return kMost;
    consumed += count * global;
    iterations -= count;
  }
  return consumed;
}

std::vector<BatchSizes> BatchSchedule::all() const {
  std::vector<BatchSizes> sizes;
  for (const Step& step : schedule_) sizes.push_back(sized(step.global));
  if (!sizes.empty()) return sizes;
  for (int64_t step = 0; step <= steps_; ++step)
    sizes.push_back(sized(full_.global - (steps_ - step) * increment_));
  return sizes;
}

SampleRange microbatch_samples(int64_t consumed, int64_t micro_batch_size, int64_t microbatch,
                               int64_t rank, int64_t ranks) {
  const int64_t first = consumed + (microbatch * ranks + rank) * micro_batch_size;
  return {first, first + micro_batch_size};
}

}  // namespace lockstep
