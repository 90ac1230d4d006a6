#pragma once

#include <cstdint>
#include <deque>
#include <limits>
#include <string_view>
#include <vector>

/// Losses and gradient norms that are far above those of previous iterations. Needs no libtorch.
namespace lockstep {

/// Which number of an iteration is a spike.
enum class Spike { none, loss, grad_norm };

/// "loss", "grad_norm"; empty for none.
std::string_view name_of(Spike spike);

/// The limits that an iteration must not exceed.
struct SpikeLimits {
  double loss = std::numeric_limits<double>::infinity();
  double grad_norm = std::numeric_limits<double>::infinity();

  bool exceeded_by(double found_loss, double found_norm) const {
    return found_loss > loss || found_norm > grad_norm;
  }
  /// Which of the two exceeds its limit, the loss first. A number that is not finite is handled
  /// elsewhere and is not a spike.
  Spike judge(double found_loss, double found_norm) const;
};

/// The last accepted iterations, for train.on_spike. With mean m and standard deviation s (of n
/// values, divided by n), the value x of the next iteration is a spike if x > m + zscore s, llm.c's
/// z-score (x - m) / s. There is no limit before the window is full, or if all its values are the
/// same.
class SpikeWindow {
 public:
  /// `size` >= 1 iterations.
  SpikeWindow(int64_t size, double zscore) : size_(size), zscore_(zscore) {}

  SpikeLimits limits() const;
  /// The values of an iteration whose update was made.
  void accept(double loss, double grad_norm);

  /// The values, oldest first, to save in a checkpoint and restore. If there are more than the
  /// window's size, the last ones stay; if the two lists differ in length, none.
  std::vector<double> losses() const { return {losses_.begin(), losses_.end()}; }
  std::vector<double> grad_norms() const { return {norms_.begin(), norms_.end()}; }
  void restore(const std::vector<double>& losses, const std::vector<double>& grad_norms);

 private:
  double limit_of(const std::deque<double>& values) const;

  int64_t size_;
  double zscore_;
  std::deque<double> losses_, norms_;
};

}  // namespace lockstep
