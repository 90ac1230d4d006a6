#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/core/config.h"

namespace lockstep {

/// Throws ConfigError if fields of a resolved configuration contradict each other.
void check_rules(const Config& config);

/// The relative shares of `data.split` as fractions that add up to 1: training, validation, rest
/// (0 where it is not given). Throws ConfigError naming data.split.
std::vector<double> parse_split(const std::string& split);

/// The weights of `data.blend`, as they are given. Throws ConfigError naming data.blend unless they
/// are numbers > 0, as many as there are `paths`.
std::vector<double> parse_blend(const std::string& blend, size_t paths);

/// How the global batch grows: from `start` sequences by `increment` until `samples` are consumed.
struct BatchRampUp {
  int64_t start = 0;
  int64_t increment = 0;
  int64_t samples = 0;
};

/// What `train.rampup_batch_size` says. Throws ConfigError naming it unless it is three integers,
/// each at least 1.
BatchRampUp parse_rampup_batch_size(const std::string& text);

}  // namespace lockstep
