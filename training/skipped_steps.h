#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "lockstep/training/metrics.h"

/// Updates that a run has skipped, and why. Needs no libtorch.
namespace lockstep {

enum class SkipReason {
  not_finite,            ///< the loss or the gradient was not finite
  norm_above_threshold,  ///< the gradient norm was above optimizer.grad_norm_skip_threshold
  spike,                 ///< with train.on_spike
};
inline constexpr size_t kSkipReasons = 3;

/// Of an iteration that was skipped.
SkipReason reason_of_skip(const IterationMetrics& metrics);

/// The skipped steps in a row, until now.
class SkippedSteps {
 public:
  /// Counts an iteration; one that was not skipped begins a new row.
  void note(const IterationMetrics& metrics);
  /// The number that a checkpoint holds, which does not hold the reasons.
  void restore(int64_t count);

  int64_t count() const { return count_; }
  /// Whether there are some, all with a finite loss and gradient, and without a spike. Not if the
  /// reason of one is not known.
  bool are_only_above_threshold() const;
  /// The reasons that are known, joined by "or": "whose gradients are not finite", "whose gradient
  /// norms are above optimizer.grad_norm_skip_threshold = 1 (the last: 2.1)", "which are spikes".
  /// `threshold`: that of the configuration.
  std::string reasons(double threshold) const;

 private:
  int64_t& of(SkipReason reason) { return of_reason_[static_cast<size_t>(reason)]; }
  int64_t of(SkipReason reason) const { return of_reason_[static_cast<size_t>(reason)]; }

  int64_t count_ = 0;
  std::array<int64_t, kSkipReasons> of_reason_ = {};  ///< of those that were noted
  double last_norm_ = 0;                              ///< that was above the threshold
};

}  // namespace lockstep
