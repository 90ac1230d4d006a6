#include "lockstep/training/batch_sizes.h"

#include <algorithm>

#include "lockstep/core/check.h"
#include "lockstep/core/config_rules.h"
#include "lockstep/core/integers.h"

namespace lockstep {

BatchSizes batch_sizes(const TrainConfig& config, int64_t data_parallel_size) {
  const int64_t together =
      checked_mul(config.micro_batch_size, data_parallel_size, "train.micro_batch_size");
  const int64_t global = config.global_batch_size.value_or(together);
  require<ConfigError>(global % together == 0,
                       "train.global_batch_size: found {}, allowed: a multiple of {} "
                       "(train.micro_batch_size {} * {} data-parallel ranks)",
                       global, together, config.micro_batch_size, data_parallel_size);
  return {config.micro_batch_size, global, global / together};
}

BatchSchedule::BatchSchedule(const TrainConfig& config, int64_t data_parallel_size)
    : full_(batch_sizes(config, data_parallel_size)) {
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
  const int64_t together = full_.micro * data_parallel_size;
  // Every batch is a multiple if two neighbours are.
  for (const int64_t global : {ramp.start, ramp.start + (steps_ > 0 ? increment_ : 0)})
    require<ConfigError>(global % together == 0,
                         "train.rampup_batch_size: found '{}', which has a batch of {}, allowed: "
                         "multiples of {} (train.micro_batch_size {} * {} data-parallel ranks)",
                         text, global, together, full_.micro, data_parallel_size);
}

BatchSizes BatchSchedule::sized(int64_t global) const {
  return {full_.micro, global, global / (full_.global / full_.num_microbatches)};
}

BatchSizes BatchSchedule::at(int64_t consumed_samples) const {
  if (steps_ == 0 || consumed_samples > samples_) return full_;
  const double samples_per_step = static_cast<double>(samples_) / static_cast<double>(steps_);
  const auto step = static_cast<int64_t>(static_cast<double>(consumed_samples) / samples_per_step);
  return sized(full_.global - (steps_ - std::min(step, steps_)) * increment_);
}

std::vector<BatchSizes> BatchSchedule::all() const {
  std::vector<BatchSizes> sizes;
  for (int64_t step = 0; step <= steps_; ++step)
    sizes.push_back(sized(full_.global - (steps_ - step) * increment_));
  return sizes;
}

}  // namespace lockstep
