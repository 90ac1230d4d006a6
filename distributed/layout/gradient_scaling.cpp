#include "lockstep/distributed/gradient_scaling.h"

#include <numeric>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

ScalingFactor fraction(int64_t numerator, int64_t denominator) {
  const int64_t divisor = std::gcd(numerator, denominator);
  return {numerator / divisor, denominator / divisor};
}

}  // namespace

GradientScalingMode scaling_mode(const DistributedDataParallelConfig& config) {
  if (config.calculate_per_token_loss.value_or(!config.average_in_collective))
    return GradientScalingMode::per_token;
  return config.average_in_collective ? GradientScalingMode::average_in_collective
                                      : GradientScalingMode::average;
}

const char* to_string(GradientScalingMode mode) {
  switch (mode) {
    case GradientScalingMode::per_token:
      return "per-token";
    case GradientScalingMode::average:
      return "average";
    case GradientScalingMode::average_in_collective:
      return "average-in-collective";
  }
  return "";
}

ScalingFactor scaling_factor(GradientScalingMode mode, int64_t dp_cp, int64_t ranks) {
  require<ConfigError>(dp_cp >= 1 && ranks >= 1,
                       "gradient scaling: found a sum over {} of {} data-parallel ranks, allowed: "
                       ">= 1 of >= 1",
                       ranks, dp_cp);
  switch (mode) {
    case GradientScalingMode::average:
      return fraction(1, dp_cp);
    case GradientScalingMode::average_in_collective:
      return fraction(ranks, dp_cp);
    default:
      return {};
  }
}

GradientScaling gradient_scaling(GradientScalingMode mode, int64_t dp_cp, int64_t edp) {
  return {scaling_factor(mode, dp_cp, dp_cp), scaling_factor(mode, dp_cp, edp)};
}

}  // namespace lockstep
