#include "lockstep/training/skipped_steps.h"

#include <fmt/ranges.h>

#include <cmath>
#include <vector>

namespace lockstep {

SkipReason reason_of_skip(const IterationMetrics& metrics) {
  if (metrics.spike != Spike::none) return SkipReason::spike;
  const bool finite = std::isfinite(metrics.grad_norm) && std::isfinite(metrics.lm_loss);
  return finite ? SkipReason::norm_above_threshold : SkipReason::not_finite;
}

void SkippedSteps::note(const IterationMetrics& metrics) {
  if (!metrics.skipped) return restore(0);
  const SkipReason reason = reason_of_skip(metrics);
  ++count_;
  ++of(reason);
  if (reason == SkipReason::norm_above_threshold) last_norm_ = metrics.grad_norm;
}

void SkippedSteps::restore(int64_t count) {
  count_ = count;
  of_reason_ = {};
}

bool SkippedSteps::are_only_above_threshold() const {
  return count_ > 0 && of(SkipReason::norm_above_threshold) == count_;
}

std::string SkippedSteps::reasons(double threshold) const {
  std::vector<std::string> texts;
  if (of(SkipReason::not_finite) > 0) texts.emplace_back("whose gradients are not finite");
  if (of(SkipReason::norm_above_threshold) > 0)
    texts.push_back(
        fmt::format("whose gradient norms are above optimizer.grad_norm_skip_threshold = {:g} (the "
                    "last: {:g})",
                    threshold, last_norm_));
  if (of(SkipReason::spike) > 0) texts.emplace_back("which are spikes");
  return fmt::format("{}", fmt::join(texts, " or "));
}

}  // namespace lockstep
