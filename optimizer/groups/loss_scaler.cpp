#include "lockstep/optimizer/loss_scaler.h"

#include <algorithm>
#include <cmath>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

DynamicGradScalerOptions checked(const DynamicGradScalerOptions& options) {
  const auto check = [](bool allowed, const char* name, auto value, const char* bounds) {
    require<ConfigError>(allowed, "DynamicGradScaler: {}: found {}, allowed: {}", name, value,
                         bounds);
  };
  const auto& o = options;
  check(std::isfinite(o.min_scale) && o.min_scale > 0, "min_scale", o.min_scale, "> 0");
  check(std::isfinite(o.initial_scale) && o.initial_scale >= o.min_scale, "initial_scale",
        o.initial_scale, ">= min_scale");
  check(std::isfinite(o.growth_factor) && o.growth_factor > 1, "growth_factor", o.growth_factor,
        "> 1");
  check(o.backoff_factor > 0 && o.backoff_factor < 1, "backoff_factor", o.backoff_factor,
        "> 0 and < 1");
  check(o.growth_interval >= 1, "growth_interval", o.growth_interval, ">= 1");
  check(o.hysteresis >= 1, "hysteresis", o.hysteresis, ">= 1");
  return options;
}

const GradScalerState& checked(const GradScalerState& state) {
  require<ConfigError>(std::isfinite(state.scale) && state.scale > 0,
                       "loss scale: found {}, allowed: > 0", state.scale);
  require<ConfigError>(state.growth_tracker >= 0, "growth tracker: found {}, allowed: >= 0",
                       state.growth_tracker);
  return state;
}

}  // namespace

GradScaler::GradScaler(const GradScalerState& state) : state_(checked(state)) {}

void GradScaler::restore(const GradScalerState& state) { state_ = checked(state); }

ConstantGradScaler::ConstantGradScaler(double scale) : GradScaler({.scale = scale}) {}

void ConstantGradScaler::update(bool /*found_inf*/) {}

void ConstantGradScaler::restore(const GradScalerState& state) { (void)checked(state); }

DynamicGradScaler::DynamicGradScaler(const DynamicGradScalerOptions& options)
    : GradScaler(
          {.scale = checked(options).initial_scale, .hysteresis_tracker = options.hysteresis}),
      options_(options) {}

void DynamicGradScaler::update(bool found_inf) {
  if (found_inf) {
    state_.growth_tracker = 0;
    if (--state_.hysteresis_tracker <= 0)
      state_.scale = std::max(state_.scale * options_.backoff_factor, options_.min_scale);
    return;
  }
  if (++state_.growth_tracker < options_.growth_interval) return;
  state_.growth_tracker = 0;
  state_.hysteresis_tracker = options_.hysteresis;
  state_.scale *= options_.growth_factor;
}

}  // namespace lockstep
