#include "lockstep/optimizer/adamw.h"

#include <algorithm>
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

/// Ranges of `owned` that hold parameters, counted from its start, neighbours with equal weight
/// decay merged. A gap that lies inside a range is zero in gradient and parameter, and stays so.
std::vector<kernels::AdamWSegment> segments_of(const ParamAndGradBuffer& buffer,
                                               const ElementRange& owned) {
  std::vector<kernels::AdamWSegment> segments;
  for (const ParamLayout::Bucket& bucket : buffer.layout().buckets) {
    if (bucket.end <= owned.start || bucket.start >= owned.end) continue;
    for (const int64_t index : bucket.params) {
      const auto& slot = buffer.layout().slots[static_cast<size_t>(index)];
      const bool decay = buffer.params()[static_cast<size_t>(index)].description.apply_weight_decay;
      const int64_t start = std::max(slot.start, owned.start) - owned.start;
      const int64_t end = std::min(slot.end, owned.end) - owned.start;
      if (start >= end) continue;
      if (!segments.empty() && segments.back().weight_decay == decay)
        segments.back().end = end;
      else
        segments.push_back({start, end, decay});
    }
  }
  return segments;
}

AdamW::State make_state(const ParamAndGradBuffer& buffer) {
  const at::ScalarType dtype = buffer.param_data().scalar_type();
  require<ConfigError>(dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16,
                       "AdamW: parameter '{}' is {}, allowed: Float, Double, BFloat16",
                       buffer.params().front().name, at::toString(dtype));
  const bool separate = dtype == at::kBFloat16;
  const auto options = buffer.param_data().options().dtype(separate ? at::kFloat : dtype);
  const int64_t numel = buffer.owned_numel();
  return {separate ? at::empty({numel}, options) : at::Tensor(), at::zeros({numel}, options),
          at::zeros({numel}, options)};
}

at::Tensor slice(const at::Tensor& tensor, const ElementRange& range) {
  return tensor.defined() ? tensor.slice(0, range.start, range.end) : tensor;
}

}  // namespace

AdamW::AdamW(std::vector<DistributedDataParallel*> models, const OptimizerConfig& config)
    : AdamW(std::move(models), config, /*sharded=*/false) {}

AdamW::AdamW(std::vector<DistributedDataParallel*> models, const OptimizerConfig& config,
             bool sharded)
    : models_(std::move(models)), config_(config) {
  const char* const name = sharded ? "DistributedOptimizer" : "AdamW";
  require<UsageError>(!models_.empty(), "{}: no model was given", name);
  check_config(config);
  for (const DistributedDataParallel* model : models_) {
    require<UsageError>(model->is_sharded() == sharded,
                        "{}: found a model {} ddp.use_distributed_optimizer, allowed: {}", name,
                        sharded ? "without" : "with", sharded ? "with it" : "without it");
    for (const auto& buffer : model->buffers()) {
      targets_.push_back({buffer.get(), pieces_of(*buffer)});
      states_.push_back(make_state(*buffer));
    }
  }
  reload_model_params();
}

std::vector<AdamW::Piece> AdamW::pieces_of(const ParamAndGradBuffer& buffer) {
  std::vector<Piece> pieces;
  int64_t offset = 0;
  for (const ElementRange& owned : buffer.owned()) {
    pieces.push_back({owned, {offset, offset + owned.numel()}, segments_of(buffer, owned)});
    offset += owned.numel();
  }
  return pieces;
}

AdamW::Views AdamW::views_of(const Target& target, const State& state, const Piece& piece) {
  return {slice(target.buffer->param_data(), piece.in_buffer),
          slice(target.buffer->grad_data(), piece.in_buffer), slice(state.master, piece.in_state),
          slice(state.exp_avg, piece.in_state), slice(state.exp_avg_sq, piece.in_state)};
}

AdamW::StepResult AdamW::step() {
  const at::NoGradGuard no_grad;
  const double norm = grad_norm(models_).item<double>();
  if (skips_step(norm, config_)) return {norm, true};
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
    for (const Piece& piece : targets_[i].pieces) {
      const Views views = views_of(targets_[i], states_[i], piece);
      const bool separate = views.master.defined();
      kernels::adamw(separate ? views.master : views.param, views.grad, views.exp_avg,
                     views.exp_avg_sq, separate ? views.param : at::Tensor(), piece.segments,
                     scalars);
    }
    for (const NamedParameter& param : targets_[i].buffer->params())
      param.tensor.unsafeGetTensorImpl()->bump_version();
  }
  return {norm, false};
}

int64_t AdamW::state_bytes() const {
  int64_t bytes = 0;
  for (const State& state : states_)
    for (const at::Tensor& tensor : {state.master, state.exp_avg, state.exp_avg_sq})
      if (tensor.defined()) bytes += static_cast<int64_t>(tensor.nbytes());
  return bytes;
}

void AdamW::reload_model_params() {
  const at::NoGradGuard no_grad;
  for (DistributedDataParallel* model : models_) model->finish_param_sync();
  for (size_t i = 0; i < targets_.size(); ++i)
    for (const Piece& piece : targets_[i].pieces) {
      const Views views = views_of(targets_[i], states_[i], piece);
      if (views.master.defined()) views.master.copy_(views.param);
    }
}

}  // namespace lockstep
