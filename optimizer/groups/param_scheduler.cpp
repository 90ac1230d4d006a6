#include "lockstep/optimizer/param_scheduler.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "lockstep/core/check.h"
#include "lockstep/core/config_bounds.h"

namespace lockstep {
namespace {

double half_cosine(double share) { return 0.5 * (std::cos(std::numbers::pi * share) + 1); }

double wsd_coefficient(WsdDecayStyle style, double share) {
  switch (style) {
    case WsdDecayStyle::exponential:
      return 2 * std::pow(0.5, share) - 1;
    case WsdDecayStyle::linear:
      return 1 - share;
    case WsdDecayStyle::cosine:
      return half_cosine(share);
    case WsdDecayStyle::minus_sqrt:
      return 1 - std::sqrt(share);
  }
  fail<UsageError>("unknown decay style {}", static_cast<int>(style));
}

}  // namespace

OptimizerParamScheduler::OptimizerParamScheduler(const OptimizerConfig& config, int64_t train_iters,
                                                 int64_t global_batch_size,
                                                 std::optional<int64_t> run_samples)
    : config_(config) {
  TrainConfig batch;
  batch.global_batch_size = global_batch_size;
  check_bounds(batch);
  const auto samples = [&](int64_t iterations) {
    return static_cast<double>(iterations) * static_cast<double>(global_batch_size);
  };
  const std::optional<int64_t>& decay_iters = config.lr_decay_iters;
  require<ConfigError>(
      !decay_iters || config.lr_warmup_iters < *decay_iters || train_iters == 0,
      "optimizer.lr_decay_iters: found {}, allowed: > optimizer.lr_warmup_iters ({})",
      decay_iters.value_or(0), config.lr_warmup_iters);
  const bool ends_with_wsd = config.lr_decay_style == LrDecayStyle::WSD;
  require<ConfigError>(
      !ends_with_wsd || config.lr_wsd_decay_iters.has_value(),
      "optimizer.lr_wsd_decay_iters: not set, but optimizer.lr_decay_style = WSD needs it");
  warmup_ = samples(config.lr_warmup_iters);
  run_ = run_samples ? static_cast<double>(*run_samples) : samples(train_iters);
  decay_ = decay_iters ? samples(*decay_iters) : std::max(run_, warmup_ + samples(1));
  wsd_decay_ = samples(config.lr_wsd_decay_iters.value_or(0));
  require<ConfigError>(
      decay_iters || !ends_with_wsd || wsd_decay_ <= decay_,
      "optimizer.lr_wsd_decay_iters: found {}, which are {:.0f} samples in batches "
      "of {}, allowed: at most {:.0f} samples, because the decay ends with the run; or set "
      "optimizer.lr_decay_iters",
      config.lr_wsd_decay_iters.value_or(0), wsd_decay_, global_batch_size, decay_);
}

double OptimizerParamScheduler::decay_coefficient(double n) const {
  const double share = (n - warmup_) / (decay_ - warmup_);
  switch (config_.lr_decay_style) {
    case LrDecayStyle::linear:
      return 1 - share;
    case LrDecayStyle::cosine:
      return half_cosine(share);
    case LrDecayStyle::WSD: {
      const double start = decay_ - wsd_decay_;
      return n <= start ? 1 : wsd_coefficient(config_.lr_wsd_decay_style, (n - start) / wsd_decay_);
    }
    default:
      return 1;
  }
}

double OptimizerParamScheduler::learning_rate(int64_t samples, double max_lr, double min_lr) const {
  const auto n = static_cast<double>(samples);
  const double first = config_.lr_warmup_init;
  if (warmup_ > 0 && n <= warmup_) return first + (max_lr - first) * n / warmup_;
  if (config_.lr_decay_style == LrDecayStyle::constant) return max_lr;
  if (n > decay_) return min_lr;
  if (config_.lr_decay_style == LrDecayStyle::inverse_square_root)
    return std::max(min_lr, max_lr * std::sqrt(std::max(warmup_, 1.0) / std::max(n, 1.0)));
  return min_lr + decay_coefficient(n) * (max_lr - min_lr);
}

double OptimizerParamScheduler::weight_decay(int64_t samples) const {
  const double first = config_.start_weight_decay.value_or(config_.weight_decay);
  const double last = config_.end_weight_decay.value_or(config_.weight_decay);
  const auto n = static_cast<double>(samples);
  const auto style = config_.weight_decay_incr_style;
  if (style == WeightDecayIncrStyle::constant || n >= run_) return last;
  const double share = n / run_;
  return first +
         (last - first) * (style == WeightDecayIncrStyle::linear ? share : half_cosine(1 - share));
}

}  // namespace lockstep
