#pragma once

#include <string>
#include <vector>

#include "lockstep/core/config.h"

namespace lockstep {

/// Throws ConfigError if fields of a resolved configuration contradict each other.
void check_rules(const Config& config);

/// The relative shares of `data.split` as fractions that add up to 1: training, validation, rest
/// (0 where it is not given). Throws ConfigError naming data.split.
std::vector<double> parse_split(const std::string& split);

}  // namespace lockstep
