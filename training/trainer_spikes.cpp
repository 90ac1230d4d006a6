#include <cmath>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/training/trainer.h"

namespace lockstep {

Optimizer::StepLimits Trainer::step_limits(const at::Tensor& over_ranks) const {
  Optimizer::StepLimits limits{.grad_norm = limits_.grad_norm};
  if (std::isfinite(limits_.loss)) limits.skip = (over_ranks[0] / over_ranks[1]).gt(limits_.loss);
  return limits;
}

void Trainer::note_spike(const IterationMetrics& metrics) {
  if (!looks_for_spikes()) return;
  const bool finite = std::isfinite(metrics.lm_loss) && std::isfinite(metrics.grad_norm);
  if (!metrics.skipped && metrics.num_loss_tokens != 0 && finite)
    spikes_.accept(metrics.lm_loss, metrics.grad_norm);
  goes_back_ = metrics.spike != Spike::none && config_.train.on_spike == OnSpike::rewind;
}

bool Trainer::go_back(const TrainCallbacks& callbacks) {
  if (end_ != RunEnd::none) return false;
  const int64_t iteration = iteration_;
  const int64_t next_sample = consumed_samples_ + left_out_samples_;
  if (!callbacks.go_back || !callbacks.go_back()) return false;
  if (came_from_ == iteration_) {
    spike_again_ = fmt::format(
        "iteration {}: another spike, after the run had rewound to iteration {} and left out the "
        "samples of the first one",
        iteration, iteration_);
    end_ = RunEnd::diverged;
    return true;
  }
  came_from_ = iteration_;
  left_out_samples_ = next_sample - consumed_samples_;
  return true;
}

}  // namespace lockstep
