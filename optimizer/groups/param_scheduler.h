#pragma once

#include <cstdint>
#include <optional>

#include "lockstep/core/config.h"

namespace lockstep {

/// Learning rate and weight decay as functions of the samples (sequences) that training has
/// consumed, with the formulas of Megatron Core's OptimizerParamScheduler. They keep no state, so
/// a resumed run needs nothing but its count of samples. As in Megatron, `lockstep train` does not
/// count the samples of steps that were skipped.
///
/// Learning rate after n samples, with w samples of warm-up, d of warm-up and decay together, and
/// r = (n - w) / (d - w):
///
///   n <= w, w > 0         lr_warmup_init + (lr - lr_warmup_init) * n / w
///   constant              lr
///   n > d                 min_lr
///   inverse-square-root   max(min_lr, lr * sqrt(max(w, 1)) / sqrt(max(n, 1)))
///   linear, cosine, WSD   min_lr + c * (lr - min_lr), where c is
///     linear              1 - r
///     cosine              (cos(pi r) + 1) / 2
///     WSD                 1 up to the last lr_wsd_decay_iters; then, with q the share of those
///                         that is over: exponential 2 * 0.5^q - 1, linear 1 - q,
///                         cosine (cos(pi q) + 1) / 2, minus_sqrt 1 - sqrt(q)
///
/// Weight decay goes from start_weight_decay to end_weight_decay over the whole run: constant,
/// linear, or as (cos(pi (1 - n / run)) + 1) / 2.
class OptimizerParamScheduler {
 public:
  /// `config` is resolved (see resolve()). Iterations in it count `global_batch_size` samples each.
  /// `train_iters` is the length of the run. A run whose batches change size consumes `run_samples`
  /// (see BatchSchedule::samples_of()), and `global_batch_size` is what it ends with; with
  /// `run_samples` unset it consumes train_iters * global_batch_size. A decay whose lr_decay_iters
  /// is unset ends with the run, but at least one batch after the warm-up. ConfigError: a batch
  /// size below 1, a decay that is not longer than the warm-up, WSD without lr_wsd_decay_iters or
  /// with more of them than a decay of unset length has.
  OptimizerParamScheduler(const OptimizerConfig& config, int64_t train_iters,
                          int64_t global_batch_size, std::optional<int64_t> run_samples = {});

  /// Learning rate of an iteration that starts when `samples` samples have been consumed.
  double learning_rate(int64_t samples) const {
    return learning_rate(samples, config_.lr, config_.min_lr);
  }

  /// The same with another lr and min_lr, such as those of a ParamGroup; lr_warmup_init stays the
  /// same. See Optimizer::apply_schedule().
  double learning_rate(int64_t samples, double max_lr, double min_lr) const;

  /// Weight decay of that iteration.
  double weight_decay(int64_t samples) const;

 private:
  double decay_coefficient(double n) const;

  OptimizerConfig config_;
  double warmup_;     ///< samples
  double decay_;      ///< samples, warm-up included
  double wsd_decay_;  ///< samples
  double run_;        ///< samples
};

}  // namespace lockstep
