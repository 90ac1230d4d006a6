#pragma once

#include <cstdint>

/// Loss scaling for fp16: the loss is multiplied by a large factor so that small gradients do not
/// become zero, and the gradients are divided by it again. The scalers themselves are plain
/// arithmetic; found_inf() of unscale_grads.h examines the gradients. Every rank has its own scaler
/// and gets the same result of found_inf(). Optimizer contains a scaler (see
/// Optimizer::loss_scale()). With your own update:
///
///     (scaler.scale() * loss).backward();
///     finalize_model_grads(...);
///     const bool overflow = found_inf({&ddp}, 1 / scaler.scale());
///     scaler.update(overflow);
///     if (!overflow) my_update();
namespace lockstep {

/// The state of a scaler between two steps, to be saved and restored.
struct GradScalerState {
  double scale = 1;
  int64_t growth_tracker = 0;      ///< steps without overflow since the scale changed
  int64_t hysteresis_tracker = 0;  ///< overflows left until the scale shrinks
  bool operator==(const GradScalerState&) const = default;
};

/// Holds the factor by which the loss is multiplied.
class GradScaler {
 public:
  virtual ~GradScaler() = default;

  double scale() const { return state_.scale; }
  /// Records a step; `found_inf`: some gradient of some rank was not finite.
  virtual void update(bool found_inf) = 0;

  const GradScalerState& state() const { return state_; }
  /// Continues from `state`. ConfigError: a scale that is not a positive number, a negative counter
  /// of steps.
  virtual void restore(const GradScalerState& state);

 protected:
  explicit GradScaler(const GradScalerState& state);
  GradScalerState state_;
};

/// A constant factor, whatever state is restored. ConfigError: a scale that is not a positive
/// number.
class ConstantGradScaler final : public GradScaler {
 public:
  explicit ConstantGradScaler(double scale);
  void update(bool found_inf) override;
  void restore(const GradScalerState& state) override;
};

/// Numbers of DynamicGradScaler.
struct DynamicGradScalerOptions {
  double initial_scale = 4294967296.0;  ///< 2^32
  double min_scale = 1;
  double growth_factor = 2;
  double backoff_factor = 0.5;
  int64_t growth_interval = 1000;  ///< steps
  int64_t hysteresis = 2;          ///< overflows
};

/// The scale shrinks at overflow and grows after a period without overflow, as in Megatron Core's
/// DynamicGradScaler. Overflow number `hysteresis` and each later one multiply the scale by
/// backoff_factor, but never below min_scale. After growth_interval steps in a row without overflow
/// the scale is multiplied by growth_factor, and only then does the count of overflows start again.
class DynamicGradScaler final : public GradScaler {
 public:
  /// ConfigError naming the number: min_scale > 0, initial_scale >= min_scale, growth_factor > 1,
  /// 0 < backoff_factor < 1, growth_interval >= 1, hysteresis >= 1.
  explicit DynamicGradScaler(const DynamicGradScalerOptions& options = {});
  void update(bool found_inf) override;

 private:
  DynamicGradScalerOptions options_;
};

}  // namespace lockstep
