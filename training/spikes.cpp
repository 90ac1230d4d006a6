#include "lockstep/training/spikes.h"

#include <algorithm>
#include <cmath>

namespace lockstep {

std::string_view name_of(Spike spike) {
  switch (spike) {
    case Spike::none:
      return "";
    case Spike::loss:
      return "loss";
    case Spike::grad_norm:
      return "grad_norm";
  }
  return "";
}

Spike SpikeLimits::judge(double found_loss, double found_norm) const {
  if (!std::isfinite(found_loss) || !std::isfinite(found_norm)) return Spike::none;
  if (found_loss > loss) return Spike::loss;
  return found_norm > grad_norm ? Spike::grad_norm : Spike::none;
}

SpikeLimits SpikeWindow::limits() const { return {limit_of(losses_), limit_of(norms_)}; }

double SpikeWindow::limit_of(const std::deque<double>& values) const {
  constexpr double kNone = std::numeric_limits<double>::infinity();
  if (static_cast<int64_t>(values.size()) < size_) return kNone;
  const auto count = static_cast<double>(values.size());
  double sum = 0, squares = 0;
  for (const double value : values) sum += value;
  const double mean = sum / count;
  for (const double value : values) squares += (value - mean) * (value - mean);
  const double deviation = std::sqrt(squares / count);
  const auto [least, most] = std::minmax_element(values.begin(), values.end());
  return *least == *most ? kNone : mean + zscore_ * deviation;
}

void SpikeWindow::accept(double loss, double grad_norm) {
  losses_.push_back(loss);
  norms_.push_back(grad_norm);
  if (static_cast<int64_t>(losses_.size()) <= size_) return;
  losses_.pop_front();
  norms_.pop_front();
}

void SpikeWindow::restore(const std::vector<double>& losses,
                          const std::vector<double>& grad_norms) {
  losses_.clear();
  norms_.clear();
  if (losses.size() != grad_norms.size()) return;
  for (size_t i = 0; i < losses.size(); ++i) accept(losses[i], grad_norms[i]);
}

}  // namespace lockstep
