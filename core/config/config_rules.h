#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/core/config.h"

namespace lockstep {

/// The bounds of parallel.distributed_timeout_seconds: 1 ms and 100 years.
inline constexpr double kShortestTimeout = 0.001, kLongestTimeout = 3153600000;

/// Throws ConfigError if fields of resolve(given) contradict each other. The messages name fields
/// that `given` sets, if it sets one of those involved.
void check_rules(const Config& given);

/// `data.split`, or its default if it is not set: "90,10", or "1,0" with `data.valid_path`.
std::string split_of(const DataConfig& data);

/// The relative shares of a `data.split` as fractions that add up to 1: training, validation, rest
/// (0 if it is not given). Throws ConfigError naming data.split.
std::vector<double> parse_split(const std::string& split);

/// The weights of `data.blend`, as they are given. Throws ConfigError naming data.blend unless they
/// are numbers > 0, as many as there are `paths`.
std::vector<double> parse_blend(const std::string& blend, size_t paths);

/// Whether the global batch may change its size during the run.
bool has_changing_batch(const TrainConfig& train);

/// How the global batch grows: from `start` sequences by `increment` until `samples` are consumed.
struct BatchRampUp {
  int64_t start = 0;
  int64_t increment = 0;
  int64_t samples = 0;
};

/// Parses `train.rampup_batch_size`. Throws ConfigError naming it unless it is three integers, each
/// at least 1.
BatchRampUp parse_rampup_batch_size(const std::string& text);

/// Global batches of `global` sequences for iterations that begin when at least `samples` are
/// consumed.
struct BatchStep {
  int64_t samples = 0;
  int64_t global = 0;
};

/// Parses `train.step_batch_size_schedule`: at least one step, the first from 0 samples on, each
/// further one from a larger number. Throws ConfigError naming it otherwise.
std::vector<BatchStep> parse_step_batch_size_schedule(const std::string& text);

}  // namespace lockstep
