#pragma once

#include <cstdint>

#include "lockstep/core/config.h"

namespace lockstep {

/// How the gradients of the data-parallel ranks are normalized.
enum class GradientScalingMode {
  per_token,              ///< sum; finalize_model_grads divides by the tokens of the global batch
  average,                ///< scale by 1 / ranks, then sum
  average_in_collective,  ///< average in the collective
};

/// The mode that calculate_per_token_loss and average_in_collective select.
GradientScalingMode scaling_mode(const DistributedDataParallelConfig& config);

/// "per-token", "average", "average-in-collective"
const char* to_string(GradientScalingMode mode);

/// An exact fraction in lowest terms.
struct ScalingFactor {
  int64_t numerator = 1;
  int64_t denominator = 1;
  bool operator==(const ScalingFactor&) const = default;
};

/// What a buffer is multiplied by before its collective.
struct GradientScaling {
  ScalingFactor dense;
  ScalingFactor expert;
};

/// The factors for `dp_cp` data- and context-parallel ranks and `edp` expert-data-parallel ranks.
///
/// An expert gradient is summed over edp replicas only, but each of them has seen the tokens of all
/// the ranks that send to it; so the net factor is 1 / dp_cp for experts too:
///
///   mode                    dense     expert       collective
///   per_token               1         1            sum
///   average                 1/dp_cp   1/dp_cp      sum
///   average_in_collective   1         edp/dp_cp    average over the buffer's own group
///
/// ConfigError: a count below 1.
GradientScaling gradient_scaling(GradientScalingMode mode, int64_t dp_cp, int64_t edp);

/// The factor of one buffer, whose collective adds over `ranks`: `dp_cp` of them or, for experts,
/// `edp`. ConfigError: a count below 1.
ScalingFactor scaling_factor(GradientScalingMode mode, int64_t dp_cp, int64_t ranks);

}  // namespace lockstep
