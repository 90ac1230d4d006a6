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

GradientScaling gradient_scaling(GradientScalingMode mode, int64_t dp_cp, int64_t edp) {
  require<ConfigError>(
      dp_cp >= 1 && edp >= 1,
      "gradient scaling: found {} data-parallel and {} expert-data-parallel ranks, "
      "allowed: >= 1",
      dp_cp, edp);
  switch (mode) {
    case GradientScalingMode::average:
      return {fraction(1, dp_cp), fraction(1, dp_cp)};
    case GradientScalingMode::average_in_collective:
      return {fraction(1, 1), fraction(edp, dp_cp)};
    default:
      return {};
  }
}

}  // namespace lockstep
