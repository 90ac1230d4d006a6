#include "lockstep/optimizer/adamw.h"

#include <cmath>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/optimizer/clip_grads.h"

namespace lockstep {
namespace {

void check_config(const OptimizerConfig& config) {
  const auto at_least_zero = [](const char* field, double value) {
    require<ConfigError>(std::isfinite(value) && value >= 0,
                         "optimizer.{}: found {}, allowed: >= 0", field, value);
  };
  const auto below_one = [](const char* field, double value) {
    require<ConfigError>(value >= 0 && value < 1, "optimizer.{}: found {}, allowed: >= 0 and < 1",
                         field, value);
  };
  at_least_zero("lr", config.lr);
  at_least_zero("weight_decay", config.weight_decay);
  at_least_zero("clip_grad", config.clip_grad);
  at_least_zero("adam_eps", config.adam_eps);
  below_one("adam_beta1", config.adam_beta1);
  below_one("adam_beta2", config.adam_beta2);
}

/// Ranges of the buffer that hold parameters, neighbours with equal weight decay merged. A gap that
/// lies inside a range is zero in gradient and parameter, and stays so.
std::vector<kernels::AdamWSegment> segments_of(const ParamAndGradBuffer& buffer) {
  std::vector<kernels::AdamWSegment> segments;
  for (const ParamLayout::Bucket& bucket : buffer.layout().buckets)
    for (const int64_t index : bucket.params) {
      const auto& slot = buffer.layout().slots[static_cast<size_t>(index)];
      const bool decay = buffer.params()[static_cast<size_t>(index)].description.apply_weight_decay;
      if (slot.start == slot.end) continue;
      if (!segments.empty() && segments.back().weight_decay == decay)
        segments.back().end = slot.end;
      else
        segments.push_back({slot.start, slot.end, decay});
    }
  return segments;
}

AdamW::State make_state(const ParamAndGradBuffer& buffer) {
  const at::Tensor& params = buffer.param_data();
  const at::ScalarType dtype = params.scalar_type();
  require<ConfigError>(dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16,
                       "AdamW: parameter '{}' is {}, allowed: Float, Double, BFloat16",
                       buffer.params().front().name, at::toString(dtype));
  at::Tensor master = dtype == at::kBFloat16 ? params.to(at::kFloat) : params;
  return {master, at::zeros_like(master), at::zeros_like(master)};
}

}  // namespace

AdamW::AdamW(std::vector<DistributedDataParallel*> models, const OptimizerConfig& config)
    : models_(std::move(models)), config_(config) {
  require<UsageError>(!models_.empty(), "AdamW: no model was given");
  check_config(config);
  for (const DistributedDataParallel* model : models_)
    for (const auto& buffer : model->buffers()) {
      targets_.push_back({buffer.get(), segments_of(*buffer)});
      states_.push_back(make_state(*buffer));
    }
}

AdamW::StepResult AdamW::step() {
  const at::NoGradGuard no_grad;
  const double norm = grad_norm(models_).item<double>();
  if (!std::isfinite(norm)) return {norm, true};
  ++num_steps_;
  const auto steps = static_cast<double>(num_steps_);
  const kernels::AdamWScalars scalars = {
      .learning_rate = config_.lr,
      .beta1 = config_.adam_beta1,
      .beta2 = config_.adam_beta2,
      .eps = config_.adam_eps,
      .weight_decay = config_.weight_decay,
      .bias_correction1 = 1 - std::pow(config_.adam_beta1, steps),
      .bias_correction2 = 1 - std::pow(config_.adam_beta2, steps),
      .grad_scale = clip_coefficient(norm, config_.clip_grad)};
  for (size_t i = 0; i < targets_.size(); ++i) {
    const ParamAndGradBuffer& buffer = *targets_[i].buffer;
    const State& state = states_[i];
    const bool separate = !state.master.is_same(buffer.param_data());
    kernels::adamw(state.master, buffer.grad_data().to(state.master.scalar_type()), state.exp_avg,
                   state.exp_avg_sq, separate ? buffer.param_data() : at::Tensor(),
                   targets_[i].segments, scalars);
    for (const NamedParameter& param : buffer.params())
      param.tensor.unsafeGetTensorImpl()->bump_version();
  }
  return {norm, false};
}

void AdamW::reload_model_params() {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < targets_.size(); ++i)
    if (!states_[i].master.is_same(targets_[i].buffer->param_data()))
      states_[i].master.copy_(targets_[i].buffer->param_data());
}

}  // namespace lockstep
