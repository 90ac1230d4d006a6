#include "lockstep/optimizer/optimizer.h"

#include <algorithm>
#include <cmath>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/core/config_bounds.h"
#include "lockstep/core/planned_cpu.h"
#include "lockstep/core/trace_scope.h"
#include "lockstep/distributed/finalize_passes.h"
#include "lockstep/distributed/notify_on_error.h"
#include "lockstep/distributed/parameter_check.h"
#include "lockstep/distributed/step_access.h"
#include "lockstep/optimizer/agreement.h"
#include "lockstep/optimizer/clip_grads.h"
#include "lockstep/optimizer/counted_grads.h"
#include "lockstep/optimizer/optimizer_state.h"
#include "lockstep/optimizer/param_scheduler.h"
#include "lockstep/optimizer/step_control.h"
#include "lockstep/optimizer/update_rules.h"

namespace lockstep {
namespace {

template <class Predicate>
bool any_buffer(const std::vector<DistributedDataParallel*>& models, Predicate predicate) {
  for (const DistributedDataParallel* model : models)
    for (const auto& buffer : model->buffers())
      if (predicate(*buffer)) return true;
  return false;
}

bool has_fp16(const std::vector<DistributedDataParallel*>& models) {
  return any_buffer(models, [](const ParamAndGradBuffer& buffer) {
    return buffer.param_data().scalar_type() == at::kHalf;
  });
}

bool has_whole_matrices(const std::vector<DistributedDataParallel*>& models) {
  return any_buffer(models, [](auto& buffer) { return buffer.holds_whole_matrices(); });
}

/// The parameters in the order of the buffers.
std::vector<NamedParameter> params_of(const std::vector<DistributedDataParallel*>& models) {
  std::vector<NamedParameter> params;
  for (const DistributedDataParallel* model : models)
    for (const auto& buffer : model->buffers())
      params.insert(params.end(), buffer->params().begin(), buffer->params().end());
  return params;
}

void check_shards(const std::vector<DistributedDataParallel*>& models) {
  const auto word = [](bool sharded) { return sharded ? "with" : "without"; };
  const bool sharded = models.front()->is_sharded();
  for (size_t i = 1; i < models.size(); ++i)
    require<UsageError>(models[i]->is_sharded() == sharded,
                        "Optimizer: model {}: found a model {} ddp.use_distributed_optimizer, "
                        "allowed: {} it, as model 0",
                        i, word(!sharded), word(sharded));
}

void check_offloaded(const OptimizerConfig& config, const UpdateStatement* rule) {
  require<ConfigError>(matrix_layout(config, rule) != MatrixLayout::whole,
                       "optimizer.offload: found true, and {} updates whole matrices; allowed: "
                       "false, or a rule that updates ranges, such as adam or sgd",
                       rule ? "update rule " + rule->name : to_string(config.optimizer));
}

/// Collective; see any_rank().
void check_matrices(const std::vector<DistributedDataParallel*>& models,
                    const OptimizerConfig& config, const UpdateStatement* rule) {
  if (matrix_layout(config, rule) != MatrixLayout::whole) return;
  const ParallelState& state = models.front()->parallel_state();
  const bool found = any_rank(state, has_whole_matrices(models), "whole matrices");
  require<ConfigError>(
      found || state.device().is_meta(),  // a planned rank gets no answer
      "{}: found {}, but no parameter is a whole matrix (ParamUpdate::matrix in its "
      "description, MatrixLayout::whole of its DistributedDataParallel); allowed: {}",
      rule ? "update rule" : "optimizer.optimizer", rule ? rule->name : to_string(config.optimizer),
      rule ? "a rule of ranges, or this one with some" : "adam, sgd, or muon with some");
}

GroupedParams grouped_params(const std::vector<DistributedDataParallel*>& models,
                             const OptimizerConfig& config,
                             const std::vector<ParamOverride>& overrides) {
  const RankGrids& grids = models.front()->parallel_state().grids();
  const bool whole = grids.size(GroupKind::pp) == 1 && grids.size(GroupKind::ep) == 1;
  return group_params(params_of(models), config, overrides,
                      whole ? ListedParams::all : ListedParams::some);
}

std::unique_ptr<GradScaler> make_scaler(const OptimizerConfig& config, bool adapts) {
  if (config.loss_scale || !adapts)
    return std::make_unique<ConstantGradScaler>(config.loss_scale.value_or(1));
  return std::make_unique<DynamicGradScaler>(
      DynamicGradScalerOptions{.initial_scale = config.initial_loss_scale,
                               .min_scale = config.min_loss_scale,
                               .growth_interval = config.loss_scale_window,
                               .hysteresis = config.hysteresis});
}

bool exceeds(double norm, const Optimizer::StepLimits& limits) {
  return norm > limits.grad_norm || (limits.skip.defined() && limits.skip.item<bool>());
}

/// `control`, with 0 as its second number if `limits` skip the step too; decided on the device.
kernels::StepControl within_limits(const kernels::StepControl& control, const at::Tensor& norm,
                                   const Optimizer::StepLimits& limits) {
  if (!limits.are_set()) return control;
  at::Tensor beyond = norm.to(at::kDouble).gt(limits.grad_norm);
  if (limits.skip.defined()) beyond = beyond.logical_or(limits.skip);
  control.select(0, 1).masked_fill_(beyond, 0);
  return control;
}

/// `control` among the tensors of a planned host; see OnPlannedHost.
kernels::StepControl on_planned_host(const kernels::StepControl& control) {
  const OnPlannedHost host;
  return control.to(at::kMeta);
}

/// After the gathers of `models`: takes part in those of the layout's model chunks that have no
/// parameters on this rank, and so no model.
void align_absent_chunks(const std::vector<DistributedDataParallel*>& models) {
  const ParallelState& state = models.front()->parallel_state();
  const int64_t chunks = state.grids().sizes().virtual_pipeline.value_or(1);
  for (auto chunk = static_cast<int64_t>(models.size()); chunk < chunks; ++chunk)
    detail::StepAccess::align_gather(*models.front());
}

void check_rate(const char* call, double value) {
  require<UsageError>(std::isfinite(value) && value >= 0,
                      "Optimizer::{}: found {}, allowed: a finite number >= 0", call, value);
}

}  // namespace

Optimizer::Optimizer(std::vector<DistributedDataParallel*> models, const OptimizerConfig& config,
                     const std::vector<ParamOverride>& overrides,
                     std::shared_ptr<const UpdateRule> rule)
    : models_(std::move(models)), config_(config), own_rule_(std::move(rule)) {
  check_model_list(models_, "Optimizer");
  const ParallelState& state = models_.front()->parallel_state();
  offloaded_ = config.offload && !state.device().is_cpu();
  const at::NoGradGuard no_grad;
  check_same_optimizer(state, config, overrides, own_statement(), [&] {
    check_bounds(config);
    check_shards(models_);
    if (offloaded_) check_offloaded(config, own_statement());
    (void)grouped_params(models_, config, overrides);
  });
  check_matrices(models_, config, own_statement());
  for (DistributedDataParallel* model : models_) model->finish_param_sync();
  counted_ = std::make_unique<CountedRanges>(models_, Gaps::included, "Optimizer");
  if (config.log_num_zeros_in_grad)
    zeros_ = std::make_unique<CountedRanges>(models_, Gaps::excluded_with_padding, "Optimizer");
  make_states(overrides);
  scaler_ = make_scaler(config, any_rank(state, has_fp16(models_), "fp16 parameters"));
}

const UpdateStatement* Optimizer::own_statement() const {
  return own_rule_ ? &own_rule_->statement() : nullptr;
}

void Optimizer::make_states(const std::vector<ParamOverride>& overrides) {
  const std::vector<NamedParameter> params = params_of(models_);
  const GroupedParams grouped = notify_on_error(models_.front()->parallel_state(), [&] {
    return grouped_params(models_, config_, overrides);
  });
  groups_ = grouped.groups;
  group_of_ = grouped.group_of;
  std::vector<std::string> settings;
  for (size_t i = 0; i < params.size(); ++i)
    settings.push_back(fmt::format("[{}] {}, {}", fmt::join(params[i].tensor.sizes(), ", "),
                                   at::toString(params[i].tensor.scalar_type()),
                                   to_string(groups_[grouped.group_of[i]])));
  check_ties_over_stages(models_, settings);
  check_partial_over_stages(models_);
  const Offload offload = !offloaded_ ? Offload::none
                          : own_rule_ ? Offload::may_leave_some
                                      : Offload::writes_all;
  notify_on_error(models_.front()->parallel_state(), [&] {
    auto next = grouped.group_of.begin();
    for (const DistributedDataParallel* model : models_)
      for (const auto& buffer : model->buffers()) {
        const auto end = next + static_cast<int64_t>(buffer->params().size());
        states_.emplace_back(*buffer,
                             update_rule(config_, buffer->holds_whole_matrices(),
                                         model->parallel_state(), own_rule_),
                             std::vector(next, end), offload);
        next = end;
      }
  });
}

Optimizer::~Optimizer() = default;

void Optimizer::apply_schedule(const OptimizerParamScheduler& scheduler, int64_t samples) {
  for (ParamGroup& group : groups_)
    group.lr = scheduler.learning_rate(samples, group.max_lr, group.min_lr);
  set_weight_decay(scheduler.weight_decay(samples));
}

void Optimizer::set_learning_rate(double value) {
  check_rate("set_learning_rate", value);
  for (ParamGroup& group : groups_)
    if (group.max_lr == config_.lr && group.min_lr == config_.min_lr) group.lr = value;
}

void Optimizer::set_learning_rate(size_t group, double value) {
  require<UsageError>(group < groups_.size(),
                      "Optimizer::set_learning_rate: found group {}, allowed: < {}", group,
                      groups_.size());
  check_rate("set_learning_rate", value);
  groups_[group].lr = value;
}

void Optimizer::set_weight_decay(double value) {
  check_rate("set_weight_decay", value);
  config_.weight_decay = value;
}

Optimizer::StepResult Optimizer::step() {
  const at::Tensor numbers = start_step().cpu();
  models_.front()->parallel_state().check_failures();
  return finish_step(numbers.const_data_ptr<double>());
}

at::Tensor Optimizer::start_step(const StepLimits& limits) {
  require<UsageError>(
      !limits.are_set() || !numbers_on_device_,
      "Optimizer::start_step: found limits, allowed after keep_numbers_on_device(): "
      "none");
  const at::NoGradGuard no_grad;
  const TraceScope scope([] { return "optimizer step"; });
  const double scale = loss_scale();
  const at::Tensor norm = grad_norm(*counted_) / scale;
  at::Tensor zeros = at::zeros_like(norm);
  if (zeros_) zeros = count_zeros(*zeros_).to(norm.scalar_type());
  if (offloaded_) {
    for (OptimizerState& one : states_) one.fetch();
  } else if (!norm.is_cpu()) {
    update(within_limits(step_control(norm, config_, scale), norm, limits));
  } else if (const auto known = norm.item<double>();
             !skips_step(known, config_) && !exceeds(known, limits)) {
    update(step_control(known, config_, scale));
  }
  return at::stack({norm, zeros.reshape_as(norm)});
}

at::Tensor Optimizer::applies(const at::Tensor& numbers, const StepLimits& limits) const {
  const at::Tensor norm = numbers[0];
  return within_limits(step_control(norm, config_, loss_scale()), norm, limits)[1].gt(0);
}

Optimizer::StepResult Optimizer::finish_step(const double* numbers, bool beyond_limits) {
  StepResult result{.grad_norm = numbers[0],
                    .skipped = beyond_limits || skips_step(numbers[0], config_)};
  if (config_.log_num_zeros_in_grad) result.num_zeros = static_cast<int64_t>(numbers[1]);
  if (offloaded_ && !result.skipped) {
    const at::NoGradGuard no_grad;
    const TraceScope scope([] { return "optimizer step on the host"; });
    const kernels::StepControl control = step_control(result.grad_norm, config_, loss_scale());
    const bool planned = models_.front()->parallel_state().device().is_meta();
    update(planned ? on_planned_host(control) : control);
  }
  scaler_->update(!std::isfinite(result.grad_norm));
  if (!result.skipped) ++num_steps_;
  return result;
}

void Optimizer::keep_numbers_on_device() {
  require<UsageError>(!offloaded_,
                      "Optimizer::keep_numbers_on_device: found optimizer.offload = true, allowed: "
                      "false, because the host updates");
  if (numbers_on_device_) return;
  for (const OptimizerState& state : states_) state.count_numbers();
  for (OptimizerState& state : states_) state.keep_numbers_on_device(groups_.size());
  numbers_on_device_ = true;
  upload_numbers();
}

void Optimizer::upload_numbers() {
  require<UsageError>(numbers_on_device_,
                      "Optimizer::upload_numbers: found a call without numbers on the device, "
                      "allowed: after keep_numbers_on_device()");
  for (OptimizerState& state : states_)
    state.upload_numbers(groups_, config_.weight_decay, num_steps_ + 1);
}

void Optimizer::update(const kernels::StepControl& control) {
  auto first = states_.begin();  // of the model
  for (DistributedDataParallel* model : models_) {
    model->update_params([&](size_t buffer, size_t range) {
      first[static_cast<int64_t>(buffer)].step(range, groups_, config_.weight_decay, num_steps_ + 1,
                                               control);
    });
    first += static_cast<int64_t>(model->buffers().size());
  }
  align_absent_chunks(models_);
  for (OptimizerState& state : states_) state.note_change();
}

std::vector<StateSlice> Optimizer::state_slices() const {
  std::vector<StateSlice> slices;
  for (const OptimizerState& state : states_) state.list(slices);
  return slices;
}

void Optimizer::restore(const OptimizerProgress& progress) {
  require<ConfigError>(progress.num_steps >= 0, "optimizer: found {} steps, allowed: >= 0",
                       progress.num_steps);
  if (progress.scaler) scaler_->restore(*progress.scaler);
  num_steps_ = progress.num_steps;
}

void Optimizer::apply_master_weights() {
  const at::NoGradGuard no_grad;
  for (DistributedDataParallel* model : models_) model->finish_param_sync();
  for (OptimizerState& state : states_) state.write_params();
  for (DistributedDataParallel* model : models_) {
    model->note_params_changed();
    model->start_param_sync(/*force_sync=*/true);
  }
  align_absent_chunks(models_);
}

void Optimizer::reload_model_params() {
  const at::NoGradGuard no_grad;
  for (DistributedDataParallel* model : models_) model->finish_param_sync();
  for (OptimizerState& state : states_) state.read_params();
}

int64_t Optimizer::state_bytes() const {
  int64_t bytes = 0;
  for (const OptimizerState& state : states_) bytes += state.bytes();
  return bytes;
}

std::unique_ptr<Optimizer> make_optimizer(std::vector<DistributedDataParallel*> models,
                                          const OptimizerConfig& config,
                                          const std::vector<ParamOverride>& overrides,
                                          std::shared_ptr<const UpdateRule> rule) {
  return std::make_unique<Optimizer>(std::move(models), config, overrides, std::move(rule));
}

}  // namespace lockstep
