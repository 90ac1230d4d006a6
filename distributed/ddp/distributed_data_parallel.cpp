#include "lockstep/distributed/distributed_data_parallel.h"

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/core/optimizer_rules.h"
#include "lockstep/distributed/broadcast_values.h"
#include "lockstep/distributed/buffer_kind.h"
#include "lockstep/distributed/description_check.h"
#include "lockstep/distributed/further_passes.h"
#include "lockstep/distributed/grad_sync.h"
#include "lockstep/distributed/model_check.h"
#include "lockstep/distributed/module_buffers.h"
#include "lockstep/distributed/module_units.h"
#include "lockstep/distributed/param_sync.h"
#include "lockstep/distributed/parameter_check.h"
#include "lockstep/distributed/step_access.h"
#include "lockstep/parallel_state/axis_groups.h"
#include "lockstep/parallel_state/pipeline_position.h"

namespace lockstep {
namespace {

using Phase = GradSyncState::Phase;

/// The settings on which the ranks must agree to have the same buckets.
std::vector<ConfigValue> settings_of(const DistributedDataParallelConfig& config,
                                     bool disable_bucketing, MatrixLayout matrices) {
  Config whole;
  whole.ddp = config;
  std::vector<ConfigValue> settings = config_values(whole);
  std::erase_if(settings, [](const ConfigValue& field) { return !field.path.starts_with("ddp."); });
  settings.push_back({"disable_bucketing", disable_bucketing ? "true" : "false"});
  settings.push_back({"matrices", to_string(matrices)});
  return settings;
}

void check_sharding(const DistributedDataParallelConfig& config, MatrixLayout matrices) {
  const ShardingStrategy strategy = config.data_parallel_sharding_strategy;
  const bool lends =
      strategy == ShardingStrategy::optim_grads || strategy == ShardingStrategy::optim_grads_params;
  require<ConfigError>(!lends || matrices == MatrixLayout::cut,
                       "ddp.data_parallel_sharding_strategy: found {}, allowed with whole "
                       "matrices, which Muon needs: no_shard, optim",
                       to_string(strategy));
}

/// The units of a module's parameters; none if the sharding strategy does not need them.
std::vector<int64_t> units_for(const torch::nn::Module& module,
                               const std::vector<NamedParameter>& parameters,
                               const DistributedDataParallelConfig& config) {
  if (config.data_parallel_sharding_strategy != ShardingStrategy::optim_grads_params) return {};
  return units_of(module, parameters);
}

}  // namespace

struct DistributedDataParallel::Impl {
  static std::unique_ptr<Impl> make(const torch::nn::Module& module,
                                    const ParallelState& parallel_state,
                                    const DistributedDataParallelConfig& config,
                                    bool disable_bucketing, MatrixLayout matrices) {
    const std::vector<NamedParameter> parameters = collect_parameters(module);
    return std::make_unique<Impl>(parameters, parallel_state, config, disable_bucketing, matrices,
                                  collect_buffers(module, parameters),
                                  units_for(module, parameters, config));
  }

  Impl(const std::vector<NamedParameter>& parameters, const ParallelState& parallel_state,
       const DistributedDataParallelConfig& config, bool disable_bucketing, MatrixLayout matrices,
       std::vector<NamedParameter> buffers_of_module, const std::vector<int64_t>& units = {})
      : state(parallel_state),
        mode(lockstep::scaling_mode(config)),
        group(parallel_state.group(GroupKind::dp_cp)),
        module_buffers(std::move(buffers_of_module)) {
    check_same_model(parameters, module_buffers, state,
                     settings_of(config, disable_bucketing, matrices), units, matrices, [&] {
                       constexpr const char* kFront = "DistributedDataParallel";
                       check_ddp(config);
                       check_sharding(config, matrices);
                       check_parameter_list(parameters, kFront);
                       refuse_other_cuts(parameters, state.grids(), kFront);
                       refuse_other_devices(parameters, state, kFront);
                       refuse_shared_memory(parameters, module_buffers, kFront);
                     });
    const char* left_undone = nullptr;
    for (const NamedParameter& param : parameters)
      if (!param.tensor.requires_grad())
        frozen.push_back(param);
      else if (const char* const pass = further_pass(param.description, state.grids(), mode))
        left_undone = pass;
    const int64_t stage = PipelinePosition(state.grids(), state.rank()).stage();
    sync = std::make_unique<GradSync>(
        make_bucketing(parameters, parallel_state, config, mode,
                       disable_bucketing || !has_buckets(stage, /*chunk=*/0), matrices, units),
        group, config.overlap_grad_reduce, config.allow_unused_parameters);
    sync->set_left_undone(left_undone);
    if (config.use_distributed_optimizer)
      params = std::make_unique<ParamSync>(sync->bucketing(), state, config.overlap_param_gather);
    for (const auto& buffer : sync->bucketing().buffers) buffers.push_back(buffer.get());
    overlaps_param_gather = pre_hook = config.overlap_param_gather;
    aligns_param_gather = config.align_param_gather && state.grids().size(GroupKind::pp) > 1;
  }

  void check_params_attached() const {
    sync->guarded([&] {
      for (const auto& buffer : sync->bucketing().buffers) lockstep::check_params_attached(*buffer);
    });
  }

  void align_gathers() const {
    if (aligns_param_gather) barrier(state.group(GroupKind::pp), "start of the parameter gather");
  }

  void update_shards(const RangeUpdate& update) {
    params->mark_stale();
    const std::vector<Bucketing::Piece>& pieces = sync->bucketing().pieces;
    for (size_t i = pieces.size(); i-- > 0;) {
      update(pieces[i].buffer, pieces[i].bucket);
      if (!pre_hook) continue;
      if (i + 1 == pieces.size()) align_gathers();
      params->start_next();
    }
  }

  ProcessGroup replicas_of(const NamedParameter& param) const {
    return state.group(replicas(param.description));
  }

  void check_unfrozen() const {
    sync->guarded([&] { refuse_unfrozen(frozen); });
  }

  void require_not_reducing(const char* call) const {
    require<UsageError>(sync->state().phase() != Phase::reducing,
                        "{}: the state is reducing; call finish_grad_sync() first", call);
  }

  void refuse_lent(const char* call) const {
    require<UsageError>(
        !sync->bucketing().lends_grads(),
        "{}: needs ddp.data_parallel_sharding_strategy = no_shard or optim; with the "
        "other strategies no rank keeps whole gradients",
        call);
  }

  bool shards_params() const { return params && params->has_units(); }

  ParallelState state;
  GradientScalingMode mode;
  ProcessGroup group;
  std::vector<NamedParameter> module_buffers;
  std::vector<NamedParameter> frozen;
  std::unique_ptr<GradSync> sync;
  std::vector<const ParamAndGradBuffer*> buffers;  ///< of sync
  std::unique_ptr<ParamSync> params;               ///< null without the distributed optimizer
  bool overlaps_param_gather = false;
  bool aligns_param_gather = false;
  bool pre_hook = false;
};

DistributedDataParallel::DistributedDataParallel(const torch::nn::Module& module,
                                                 const ParallelState& parallel_state,
                                                 const DistributedDataParallelConfig& config,
                                                 bool disable_bucketing, MatrixLayout matrices)
    : impl_(Impl::make(module, parallel_state, config, disable_bucketing, matrices)) {
  broadcast_params();
}

DistributedDataParallel::DistributedDataParallel(const std::vector<NamedParameter>& parameters,
                                                 const ParallelState& parallel_state,
                                                 const DistributedDataParallelConfig& config,
                                                 bool disable_bucketing, MatrixLayout matrices)
    : impl_(std::make_unique<Impl>(parameters, parallel_state, config, disable_bucketing, matrices,
                                   std::vector<NamedParameter>())) {
  broadcast_params();
}

DistributedDataParallel::~DistributedDataParallel() = default;

NoSyncGuard DistributedDataParallel::no_sync() { return impl_->sync->no_sync(); }

void DistributedDataParallel::set_num_microbatches(int64_t count) {
  impl_->sync->state().set_microbatches(count);
}

void DistributedDataParallel::start_grad_sync() { impl_->sync->start(); }

void DistributedDataParallel::finish_grad_sync() {
  impl_->check_unfrozen();
  impl_->sync->finish();
}

void DistributedDataParallel::scale_gradients(double factor) {
  impl_->require_not_reducing("scale_gradients");
  impl_->sync->scale(factor);
}

void DistributedDataParallel::set_force_all_reduce(bool on) {
  impl_->refuse_lent("set_force_all_reduce");
  const Phase phase = impl_->sync->state().phase();
  require<UsageError>(phase == Phase::idle || phase == Phase::ready,
                      "set_force_all_reduce: the state is {}, allowed: idle, ready", state_text());
  impl_->sync->set_force_all_reduce(on);
}

void DistributedDataParallel::offload_grad_buffers() {
  impl_->require_not_reducing("offload_grad_buffers");
  impl_->refuse_lent("offload_grad_buffers");
  for (const auto& buffer : impl_->sync->bucketing().buffers) buffer->offload_grads();
}

void DistributedDataParallel::restore_grad_buffers() {
  for (const auto& buffer : impl_->sync->bucketing().buffers) buffer->restore_grads();
}

void DistributedDataParallel::zero_grad_buffer() {
  impl_->sync->zero_grad();
  if (impl_->params) impl_->sync->guarded([&] { impl_->params->begin_step(); });
}

void DistributedDataParallel::abandon_step() {
  impl_->sync->abandon();
  if (impl_->params) impl_->sync->guarded([&] { impl_->params->begin_step(); });
}

void DistributedDataParallel::broadcast_params() {
  unshard();
  impl_->check_params_attached();
  const at::NoGradGuard no_grad;
  std::vector<Work> works;
  for (const auto& buffer : buffers())
    works.push_back(broadcast(impl_->replicas_of(buffer->params().front()), buffer->param_data(), 0,
                              "parameters"));
  for (const auto* const untrained : {&impl_->module_buffers, &impl_->frozen})
    for (const NamedParameter& param : *untrained)
      broadcast_values(impl_->replicas_of(param), {param.tensor}, 0, kUntrainedLabel);
  for (Work& work : works) work.wait();
  reshard();
}

void DistributedDataParallel::unshard() {
  if (!impl_->shards_params()) return finish_param_sync();
  impl_->sync->guarded([&] { impl_->params->unshard(); });
}

void DistributedDataParallel::reshard() {
  if (impl_->shards_params()) impl_->sync->guarded([&] { impl_->params->reshard(); });
}

void DistributedDataParallel::start_param_sync(bool force_sync, bool force_dispatch) {
  if (!impl_->params) return;
  impl_->sync->guarded([&] {
    if (force_dispatch && !impl_->params->is_stale()) {
      impl_->params->finish();
      impl_->params->mark_stale();
    }
    if (impl_->params->none_started()) impl_->align_gathers();
    if (impl_->pre_hook && !force_sync)
      impl_->params->start(/*watch=*/true);
    else
      impl_->params->finish();
  });
}

void DistributedDataParallel::finish_param_sync() {
  if (impl_->shards_params() || param_sync_pending())
    impl_->sync->guarded([&] { impl_->params->finish(); });
}

bool DistributedDataParallel::param_sync_pending() const {
  return impl_->params && impl_->params->pending();
}

void DistributedDataParallel::disable_forward_pre_hook(bool param_sync) {
  impl_->pre_hook = false;
  if (impl_->params) impl_->params->set_ahead(false);
  if (param_sync) finish_param_sync();
}

void DistributedDataParallel::enable_forward_pre_hook() {
  require<UsageError>(impl_->overlaps_param_gather,
                      "enable_forward_pre_hook: needs ddp.overlap_param_gather");
  impl_->pre_hook = true;
  impl_->params->set_ahead(true);
}

void DistributedDataParallel::update_params(const RangeUpdate& update) {
  finish_param_sync();
  impl_->check_params_attached();
  if (!impl_->params) {
    impl_->sync->guarded([&] {
      for (size_t i = buffers().size(); i-- > 0;)
        for (size_t range = 0; range < buffers()[i]->owned().size(); ++range) update(i, range);
    });
    return;
  }
  impl_->sync->guarded([&] { impl_->update_shards(update); });
  start_param_sync();
}

void DistributedDataParallel::note_params_changed() {
  if (impl_->params) impl_->params->mark_stale();
}

bool DistributedDataParallel::is_sharded() const { return impl_->params != nullptr; }

GradientScalingMode DistributedDataParallel::scaling_mode() const { return impl_->mode; }

std::string DistributedDataParallel::state_text() const {
  return impl_->sync->state().phase_text();
}

const ParallelState& DistributedDataParallel::parallel_state() const { return impl_->state; }

const std::vector<const ParamAndGradBuffer*>& DistributedDataParallel::buffers() const {
  return impl_->buffers;
}

std::vector<BucketInfo> DistributedDataParallel::buckets() const { return impl_->sync->buckets(); }

std::string DistributedDataParallel::describe() const {
  return fmt::format("{} scaling, state {}\n", to_string(scaling_mode()), state_text()) +
         to_string(buckets());
}

std::vector<BucketReduction> detail::StepAccess::begin_finalize(DistributedDataParallel& model) {
  const DistributedDataParallel::Impl& impl = *model.impl_;
  require<UsageError>(!impl.sync->noted_final(),
                      "finalize_model_grads: the gradients of this step are final already; call "
                      "zero_grad_buffer() before the next step");
  if (impl.sync->state().phase() != Phase::ready)
    model.finish_grad_sync();
  else
    impl.sync->guarded([&] { impl.sync->refuse_replaced(); });
  return impl.sync->reductions();
}

void detail::StepAccess::end_finalize(DistributedDataParallel& model) {
  model.impl_->sync->note_final();
}

void detail::StepAccess::note_backward(DistributedDataParallel& model) {
  model.impl_->sync->note_backward();
}

void detail::StepAccess::align_gather(const DistributedDataParallel& model) {
  model.impl_->align_gathers();
}

void detail::StepAccess::require_final_gradients(const DistributedDataParallel& model,
                                                 const char* caller) {
  const DistributedDataParallel::Impl& impl = *model.impl_;
  const char* const left_undone = impl.sync->left_undone();
  require<UsageError>(
      impl.sync->state().phase() == Phase::ready && left_undone == nullptr,
      "{}: the gradients are not final (state {}{}{}); call finalize_model_grads() after the last "
      "backward",
      caller, model.state_text(), left_undone ? ", " : "", left_undone ? left_undone : "");
  impl.sync->guarded([&] { impl.sync->refuse_replaced(); });
}

}  // namespace lockstep
