#pragma once

// Internal.

#include <memory>
#include <optional>
#include <span>

#include <ATen/core/Tensor.h>

#include "lockstep/core/step_clock.h"
#include "lockstep/optimizer/group_grad_norms.h"
#include "lockstep/training/metrics.h"

namespace lockstep {

/// The measurements of each iteration besides its loss. For them the ranks exchange only what they
/// append to numbers that are summed anyway and, with train.log_grad_norm_per_group, what
/// GroupGradNorms exchanges.
class IterationTelemetry {
 public:
  /// Collective like GroupGradNorms. `optimizer` must outlive this object.
  IterationTelemetry(const Config& config, const ParallelState& parallel_state,
                     const Optimizer& optimizer);
  /// Drops iterations that were not settled.
  ~IterationTelemetry();

  /// An iteration begins; `follows`: on a device that is still working on the previous one.
  void begin(bool follows);
  /// It was launched up to its end. On the CPU it goes on until settle().
  void note_launched(IterationMetrics& metrics);
  /// It was given up.
  void abandon() { clock().abandon(); }

  /// The time until the returned object is destroyed counts for `part`.
  InPart in(StepPart part) const { return InPart(&clock(), part); }

  /// `numbers` of this rank, fp64, which are to be summed over all ranks in `iteration`. If the
  /// ranks are compared in it, every train.log_interval iterations, the times of this rank are
  /// appended: those of the iterations settled since the last time, 48 bytes per rank of the world.
  at::Tensor with_rank_times(const at::Tensor& numbers, int64_t iteration);
  /// `numbers` of the model, fp64 on its device, with the norm of each parameter group appended if
  /// those are wanted. Gradients are final.
  at::Tensor with_group_norms(const at::Tensor& numbers) const;

  /// Sets what is known once the device has reached the end of the iteration: iteration_ms, if it
  /// was measured, and what this class adds. `appended`: what with_rank_times(), summed over the
  /// ranks, and with_group_norms() have appended.
  void settle(IterationMetrics& metrics, std::span<const double> appended);

 private:
  StepClock& clock() const { return *parallel_state_.step_clock(); }

  const Optimizer& optimizer_;
  ParallelState parallel_state_;
  bool times_steps_;
  int64_t log_interval_;
  double flops_per_token_;
  std::optional<double> peak_tflops_;
  std::unique_ptr<GroupGradNorms> group_norms_;
  RankTimes rank_times_;
};

}  // namespace lockstep
