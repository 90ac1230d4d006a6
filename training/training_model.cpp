#include "lockstep/training/training_model.h"

#include <list>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/distributed/buffer_kind.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/distributed/step_access.h"
#include "lockstep/models/cross_entropy.h"
#include "lockstep/models/router_step.h"
#include "lockstep/optimizer/update_statement.h"
#include "lockstep/planner/pipeline_plan.h"
#include "lockstep/planner/stage_shapes.h"
#include "lockstep/training/evaluation_mode.h"
#include "lockstep/training/planned_host.h"
#include "lockstep/training/repeated_tasks.h"
#include "lockstep/training/run_setup.h"

namespace lockstep {

TrainingModel::TrainingModel(const Config& config, const ParallelState& parallel_state,
                             bool perform_initialization)
    : config_(config), parallel_state_(parallel_state) {
  if (config.parallel.pipeline_schedule == PipelineScheduleFamily::zb_h1)
    deferred_ = std::make_shared<DeferredGradients>();
  const GPTModelOptions options = {.dtype = parameter_dtype(config.train.precision),
                                   .device = parallel_state.device(),
                                   .seed = static_cast<uint64_t>(config.train.seed),
                                   .deferred = deferred_,
                                   .loss_scale = token_loss_scale_,
                                   .lora = config.lora,
                                   .fp8 = fp8_options(config.train),
                                   .perform_initialization = perform_initialization};
  const int64_t stage = parallel_state.group(GroupKind::pp).rank();
  for (const ModelChunk& chunk : chunks_of_stage(config, stage))
    chunks_.push_back(std::make_shared<GPTModel>(config.model, config.parallel, parallel_state,
                                                 chunk.stage(), options));
  for (size_t c = 0; c < chunks_.size(); ++c) {
    if (chunks_[c]->parameters().empty()) continue;
    const auto chunk = static_cast<int64_t>(c);
    wrappers_.push_back(std::make_unique<DistributedDataParallel>(
        *chunks_[c], parallel_state, config.ddp, /*disable_bucketing=*/!has_buckets(stage, chunk),
        matrix_layout(config.optimizer)));
    wrapper_of_chunk_[chunk] = wrappers_.back().get();
  }
}

std::vector<DistributedDataParallel*> TrainingModel::wrappers() const {
  std::vector<DistributedDataParallel*> list;
  for (const auto& wrapper : wrappers_) list.push_back(wrapper.get());
  return list;
}

void TrainingModel::zero_grad_buffer() {
  for (const auto& wrapper : wrappers_) wrapper->zero_grad_buffer();
}

void TrainingModel::finish_param_sync() {
  for (const auto& wrapper : wrappers_) wrapper->finish_param_sync();
}

void TrainingModel::unshard() {
  for (const auto& wrapper : wrappers_) wrapper->unshard();
}

bool TrainingModel::has_fp8() const {
  return std::any_of(chunks_.begin(), chunks_.end(),
                     [](const auto& chunk) { return chunk->fp8() != nullptr; });
}

void TrainingModel::update_fp8_scales(const at::Tensor& applied) {
  std::vector<std::shared_ptr<Fp8Scaling>> scalings;
  for (const auto& chunk : chunks_)
    if (chunk->fp8()) scalings.push_back(chunk->fp8());
  Fp8Scaling::end_step(scalings, parallel_state_.group(GroupKind::tp_dp_cp), applied);
}

void TrainingModel::forget_fp8_values() {
  for (const auto& chunk : chunks_)
    if (chunk->fp8()) chunk->fp8()->abandon_step();
}

std::vector<StateTensor> TrainingModel::fp8_state() const {
  std::vector<StateTensor> list;
  const auto add = [&](const std::string& parameter, const char* state, const at::Tensor& values) {
    const TensorBox box = whole_box(values.sizes().vec());
    list.push_back({parameter, state, {box, {0, box.numel()}}, values.view({-1})});
  };
  for (const auto& chunk : chunks_) {
    if (!chunk->fp8()) continue;
    for (const Fp8Scaling::LayerState& layer : chunk->fp8()->state()) {
      add(layer.parameter, "fp8_amax_history", layer.amax_history);
      add(layer.parameter, "fp8_scales", layer.scales);
    }
  }
  return list;
}

void TrainingModel::look_at_fp8_scales() {
  for (const auto& chunk : chunks_)
    if (chunk->fp8()) chunk->fp8()->look_again();
}

void TrainingModel::abandon_step() {
  forget_fp8_values();
  for (const auto& wrapper : wrappers_) wrapper->abandon_step();
  for (const auto& chunk : chunks_) abandon_router_step(*chunk);
}

void TrainingModel::finalize_gradients(double tokens) {
  finalize_gradients(at::full({}, tokens, at::kDouble));
}

void TrainingModel::finalize_gradients(const at::Tensor& tokens) {
  std::vector<RouterBias> biases;
  for (const auto& chunk : chunks_)
    for (RouterBias& bias : router_biases(*chunk)) biases.push_back(std::move(bias));
  if (wrappers_.front()->scaling_mode() == GradientScalingMode::per_token)
    finalize_model_grads(wrappers(), tokens, biases);
  else
    finalize_model_grads(wrappers(), std::nullopt, biases);
  for (const auto& chunk : chunks_) end_router_step(*chunk);
}

const PipelineExecutor& TrainingModel::executor(int64_t num_microbatches, bool forward_only) {
  auto& slot = executors_[{num_microbatches, forward_only}];
  if (slot) return *slot;
  PipelineExecutorOptions options = {[this](int64_t m) { return activation_shape(m); }, deferred_};
  if (PlannedHost* const host = PlannedHost::current()) {
    options.backward = [this](const PipelineTask& task, const auto& compute) {
      return backward(task, compute);
    };
    options.weight = [host](const PipelineTask&, const auto& compute) {
      const PlannedHost::InBackward scope(*host);
      compute();
    };
  }
  slot = std::make_unique<PipelineExecutor>(
      parallel_state_, make_schedule(schedule_options(config_, num_microbatches, forward_only)),
      std::move(options));
  return *slot;
}

const BatchInput& TrainingModel::input(int64_t microbatch) {
  while (static_cast<int64_t>(inputs_.size()) <= microbatch)
    inputs_.push_back((*source_)(static_cast<int64_t>(inputs_.size())));
  return inputs_[static_cast<size_t>(microbatch)];
}

TensorShape TrainingModel::activation_shape(int64_t microbatch) {
  const at::Tensor& tokens = input(microbatch).input.tokens;
  const int64_t parts =
      config_.parallel.sequence_parallel ? config_.parallel.tensor_model_parallel_size : 1;
  return {{tokens.size(1) / parts, tokens.size(0), config_.model.hidden_size},
          parameter_dtype(config_.train.precision)};
}

PipelineStage TrainingModel::stage(size_t chunk) {
  return [this, chunk, model = chunks_[chunk]](int64_t microbatch, const at::Tensor& hidden) {
    const BatchInput& batch = input(microbatch);
    const GPTInput& all = batch.input;
    const GPTStage& stage = model->stage();
    GPTInput mine = {.positions = all.positions};
    if (stage.has_embedding)
      mine.tokens = all.tokens;
    else
      mine.hidden = hidden;
    double counted = 0;
    if (stage.has_loss) {
      mine.labels = all.labels;
      // Before the forward, so that the host need not wait for it.
      counted = batch.labels ? static_cast<double>(*batch.labels)
                             : mine.labels.ne(kIgnoredLabel).sum().item<double>();
      tokens_ += counted;
    }
    const auto compute = [&] {
      const at::Tensor output = model->forward(mine);
      return stage.has_loss ? add_loss(output, counted) : output;
    };
    return tasks_ ? tasks_->forward(static_cast<int64_t>(chunk), microbatch, compute) : compute();
  };
}

at::Tensor TrainingModel::add_loss(const at::Tensor& losses, double counted) {
  loss_sum_ += losses.detach().sum(at::kDouble);
  const at::Tensor loss = loss_of_(losses);
  const bool averages = at::GradMode::is_enabled() &&
                        wrappers_.front()->scaling_mode() != GradientScalingMode::per_token;
  const auto tokens = static_cast<double>(losses.numel());
  return averages && counted > 0 && counted < tokens ? loss * (tokens / counted) : loss;
}

at::Tensor TrainingModel::backward(const PipelineTask& task,
                                   const std::function<at::Tensor()>& compute) {
  if (!tasks_) return compute();
  return tasks_->backward(task.chunk, task.microbatch, compute, [&] {
    if (const auto wrapper = wrapper_of_chunk_.find(task.chunk); wrapper != wrapper_of_chunk_.end())
      detail::StepAccess::note_backward(*wrapper->second);
  });
}

std::vector<PipelineStage> TrainingModel::begin_run(const LossOf& loss_of) {
  loss_of_ = loss_of;
  loss_sum_ = at::zeros({}, at::TensorOptions(parallel_state_.device()).dtype(at::kDouble));
  tokens_ = 0;
  std::vector<PipelineStage> stages;
  for (size_t c = 0; c < chunks_.size(); ++c) stages.push_back(stage(c));
  return stages;
}

LossSums TrainingModel::run(int64_t num_microbatches, const BatchSource& source,
                            const LossOf& loss_of) {
  run_stages(begin_run(loss_of), num_microbatches, /*forward_only=*/false, source);
  return {loss_sum_, tokens_};
}

void TrainingModel::run_stages(const std::vector<PipelineStage>& stages, int64_t num_microbatches,
                               bool forward_only, const BatchSource& source) {
  source_ = &source;
  inputs_.clear();
  PlannedHost* const host = PlannedHost::current();
  tasks_ = host && !deferred_ ? host->repeated_tasks() : nullptr;
  if (tasks_) tasks_->begin(num_microbatches, forward_only);
  executor(num_microbatches, forward_only).run(stages);
  inputs_.clear();
}

LossSums TrainingModel::run_recorded(int64_t num_microbatches, double loss_scale,
                                     const BatchSource& source, const LossOf& loss_of) {
  stages_ = begin_run(loss_of);
  if (recorded_ && !recorded_->is_of(num_microbatches, loss_scale)) recorded_.reset();
  if (recorded_) loss_sum_ = recorded_->loss_sum.zero_();
  finish_param_sync();
  for (int64_t m = 0; m < num_microbatches; ++m) {
    const BatchInput batch = source(m);
    if (m + 1 == num_microbatches || !has_run_) {
      run_one(batch);
      continue;
    }
    if (recorded_)
      note_recorded(batch);
    else
      record(batch, num_microbatches, loss_scale);
    recorded_->input.assign(batch.input);
    recorded_->work.launch();
  }
  has_run_ = true;
  return {loss_sum_, tokens_};
}

void TrainingModel::run_one(const BatchInput& batch) {
  inputs_.assign(1, batch);
  executor(1, /*forward_only=*/false).run(stages_);
  inputs_.clear();
}

void TrainingModel::record(const BatchInput& like, int64_t num_microbatches, double loss_scale) {
  recorded_.emplace(parallel_state_, like.input, loss_sum_, num_microbatches, loss_scale);
  const BatchInput read = {recorded_->input.input(), like.labels};
  executor(1, /*forward_only=*/false);
  recorded_->work.record([&] { run_one(read); });
}

/// The host's bookkeeping for a replayed micro-batch, as when it runs one.
void TrainingModel::note_recorded(const BatchInput& batch) {
  tokens_ += static_cast<double>(batch.labels.value());
  for (const auto& wrapper : wrappers_) detail::StepAccess::note_backward(*wrapper);
}

at::Tensor TrainingModel::loss_of_microbatch(const at::Tensor& losses, int64_t num_microbatches,
                                             double loss_scale) const {
  const bool per_token = wrappers_.front()->scaling_mode() == GradientScalingMode::per_token;
  const at::Tensor loss =
      per_token ? losses.sum() : losses.mean() / static_cast<double>(num_microbatches);
  return loss_scale == 1 ? loss : loss * loss_scale;
}

TrainingModel::LossOf TrainingModel::prepare(int64_t averaged, double loss_scale) {
  const bool per_token = wrappers_.front()->scaling_mode() == GradientScalingMode::per_token;
  const int64_t tokens = averaged * config_.train.micro_batch_size *
                         (config_.model.seq_length / config_.parallel.context_parallel_size);
  token_loss_scale_->value = per_token ? loss_scale : loss_scale / static_cast<double>(tokens);
  token_loss_scale_->averages = !per_token;
  return [=, this](const at::Tensor& losses) {
    return loss_of_microbatch(losses, averaged, loss_scale);
  };
}

void TrainingModel::backward_locally(double loss_scale, const BatchSource& source) {
  for (const auto& wrapper : wrappers_) wrapper->set_num_microbatches(2);  // only one of them comes
  run(1, source, prepare(1, loss_scale));
}

LossSums TrainingModel::forward_backward(int64_t num_microbatches, double loss_scale,
                                         const BatchSource& source) {
  for (const auto& wrapper : wrappers_) wrapper->set_num_microbatches(num_microbatches);
  const LossOf loss_of = prepare(num_microbatches, loss_scale);
  if (config_.train.cuda_graph == CudaGraph::microbatch)
    return run_recorded(num_microbatches, loss_scale, source, loss_of);
  return run(num_microbatches, source, loss_of);
}

LossSums TrainingModel::evaluate(int64_t num_microbatches, const BatchSource& source) {
  const at::NoGradGuard no_grad;
  std::list<EvaluationMode> evaluation;
  for (const auto& chunk : chunks_) evaluation.emplace_back(*chunk);
  const auto stages = begin_run([](const at::Tensor& losses) { return losses; });
  const int64_t together = kEvaluatedTogether * config_.parallel.pipeline_model_parallel_size;
  for (int64_t first = 0, count = 0; first < num_microbatches; first += count) {
    const int64_t left = num_microbatches - first;
    count = left < 2 * together ? left : together;
    run_stages(stages, count, /*forward_only=*/true, [&](int64_t m) { return source(first + m); });
  }
  return {loss_sum_, tokens_};
}

}  // namespace lockstep
