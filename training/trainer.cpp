#include "lockstep/training/trainer.h"

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <span>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/core/optimizer_rules.h"
#include "lockstep/core/trace_scope.h"
#include "lockstep/core/upload.h"
#include "lockstep/datasets/conversation_source.h"
#include "lockstep/kernels/matrix_product.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/training/batch_input.h"

namespace lockstep {
namespace {

constexpr const char* kLoss = "loss";
constexpr size_t kNumSums = 3;  // loss, tokens, wishes for the end
constexpr size_t kStepNumbers = Optimizer::kStepNumbers;
/// Iterations that are launched operation by operation before one is recorded: by then everything
/// that is made once exists, such as communicators and tables.
constexpr int64_t kWarmUp = 2;

void use_deterministic_operations() {
  // cuBLAS reads it when its first handle is made.
  ::setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  // Nothing reads memory before it is written; filling it would cost a pass over each new tensor.
  at::globalContext().setDeterministicFillUninitializedMemory(false);
}

std::optional<double> decoupled_learning_rate(const OptimizerConfig& config,
                                              const OptimizerParamScheduler& scheduler,
                                              int64_t samples) {
  if (!config.decoupled_lr) return {};
  return scheduler.learning_rate(samples, *config.decoupled_lr,
                                 config.decoupled_min_lr.value_or(config.min_lr));
}

std::unique_ptr<c10::StreamGuard> stream_for_graphs(const Config& config, c10::Device device) {
  if (config.train.cuda_graph == CudaGraph::none) return nullptr;
  require<ConfigError>(kernels::has_device_graphs(device.type()),
                       "train.cuda_graph: found {}, allowed on {}: none",
                       to_string(config.train.cuda_graph), device.str());
  const c10::impl::VirtualGuardImpl of_device(device.type());
  return std::make_unique<c10::StreamGuard>(of_device.getStreamFromGlobalPool(device));
}

Config checked(const Config& config, const ParallelState& parallel_state) {
  check_supported(config);
  kernels::check_matrix_products();
  check_layout(config, parallel_state.world_size());
  check_replay(config.train, parallel_state.device().is_cuda());
  return resolve_for_device(config, parallel_state.device().is_cpu());
}

}  // namespace

SampleSources Trainer::open_sources(const Config& config) {
  const int64_t length = config.model.seq_length;
  const auto seed = static_cast<uint64_t>(config.train.seed);
  SampleSources sources =
      config.train.task == TrainTask::sft
          ? open_conversations(config.data, config.model.vocab_size, length, seed)
          : open_samples(config.data, config.model.vocab_size, length, seed);
  const auto check = [&](const std::unique_ptr<SampleSource>& source, const std::string& failure) {
    const bool good = config.train.eval_iters == 0 || !source || source->size() > 0;
    require<ConfigError>(good || config.train.task != TrainTask::sft,
                         "{}: found no conversation to evaluate; allowed: one or more, or "
                         "train.eval_iters = 0",
                         failure.substr(0, failure.find(':')));
    require<ConfigError>(good,
                         "{}, which takes more tokens than model.seq_length ({}); allowed: one or "
                         "more, or train.eval_iters = 0",
                         failure, length);
  };
  check(sources.validation, !sources.empty_validation.empty() ? sources.empty_validation
                            : config.data.valid_path.empty()
                                ? "data.split: the validation text has no sample"
                                : "data.valid_path: the validation text has no sample");
  check(sources.test, "data.test_path: the test text has no sample");
  return sources;
}

Trainer::Trainer(const Config& config, const ParallelState& parallel_state,
                 bool perform_initialization)
    : config_(checked(config, parallel_state)),
      parallel_state_(parallel_state),
      stream_(stream_for_graphs(config, parallel_state.device())),
      data_parallel_rank_(
          *parallel_state.grids().groups(GroupKind::dp).position_of(parallel_state.rank())),
      data_parallel_size_(parallel_state.grids().data_parallel_size()),
      batches_(config.train, data_parallel_size_),
      scheduler_(config.optimizer, config.train.train_iters, batches_.full().global,
                 batches_.samples_of(config.train.train_iters)),
      spikes_(config.train.spike_window, config.train.spike_zscore) {
  SampleSources sources = open_sources(config);
  validation_ = std::move(sources.validation);
  test_ = std::move(sources.test);
  notes_ = std::move(sources.notes);
  loader_ = std::make_unique<MicrobatchLoader>(
      std::move(sources.training), batches_,
      MicrobatchLoader::Options{.seq_length = config.model.seq_length,
                                .rank = data_parallel_rank_,
                                .ranks = data_parallel_size_,
                                .prefetch = config.data.prefetch});
  if (!config.train.step_batch_size_schedule)
    config_.train.global_batch_size = batches_.full().global;
  if (config.train.deterministic) use_deterministic_operations();
  model_ = std::make_unique<TrainingModel>(config_, parallel_state, perform_initialization);
  optimizer_ = make_optimizer(model_->wrappers(), config.optimizer);
  telemetry_ = std::make_unique<IterationTelemetry>(config_, parallel_state_, *optimizer_);
  if (config.train.cuda_graph != CudaGraph::step) return;
  optimizer_->keep_numbers_on_device();
  recorded_ = std::make_unique<RecordedStep>(parallel_state_);
}

BatchInput Trainer::training_batch() {
  const InPart data = telemetry_->in(StepPart::data);
  const TraceScope scope([] { return "data"; });
  return batch_input(loader_->next());
}

BatchInput Trainer::batch_input(const Microbatch& microbatch) const {
  BatchInput batch =
      make_batch_input(microbatch.ids, microbatch.marks, config_.model.seq_length,
                       static_cast<int64_t>(microbatch.marks.size()), parallel_state_);
  batch.input.positions.first_sample = microbatch.samples.first;
  return batch;
}

at::Tensor Trainer::host_numbers(double tokens, RunEnd wish) const {
  return at::tensor({tokens, encode_run_end(wish, parallel_state_.world_size())}, at::kDouble);
}

at::Tensor Trainer::sum_over_ranks(const at::Tensor& loss, const at::Tensor& of_host,
                                   const char* label) const {
  const RankGrids& grids = parallel_state_.grids();
  const bool counts = grids.groups(GroupKind::tp).position_of(parallel_state_.rank()) == 0;
  at::Tensor sums = at::cat({loss.view({1}), of_host});
  if (!counts) sums.slice(0, 0, 2).zero_();  // only the rank with tp position 0 counts both
  all_reduce(parallel_state_.world(), sums, ReduceOp::sum, label).wait();
  return sums;
}

Trainer::GlobalSums Trainer::global_sums(const double* values) const {
  return {values[0], values[1], agreed_end(values[2], parallel_state_.world_size())};
}

RunEnd Trainer::end_after(int64_t iteration, RunEnd wish) const {
  if (bad_loss_ != nullptr || skipped_.count() >= config_.train.max_skipped_steps)
    return RunEnd::diverged;
  return iteration >= config_.train.train_iters ? RunEnd::done : wish;
}

std::string Trainer::divergence() const {
  if (!spike_again_.empty()) return spike_again_;
  if (bad_loss_ != nullptr)
    return fmt::format("iteration {}: the {} is not a number", iteration_, bad_loss_);
  return fmt::format(
      "iterations {} to {}: found {} skipped steps in a row, {}, allowed: fewer than "
      "train.max_skipped_steps = {}",
      iteration_ - skipped_.count() + 1, iteration_, skipped_.count(),
      skipped_.reasons(config_.optimizer.grad_norm_skip_threshold.value_or(0)),
      config_.train.max_skipped_steps);
}

int64_t Trainer::last_good_iteration() const {
  if (!spike_again_.empty() || has_only_large_norms()) return iteration_;
  const bool tried = bad_loss_ == kLoss || skipped_.count() > 0;  // weights from before the steps
  return iteration_ - std::max<int64_t>(1, skipped_.count()) -
         (tried && !loss_scale_is_in_doubt() ? 1 : 0);
}

bool Trainer::loss_scale_is_in_doubt() const {
  return bad_loss_ == nullptr && skipped_.count() > 0 && !has_only_large_norms() &&
         optimizer_->loss_scale() > 1;
}

bool Trainer::has_only_large_norms() const {
  return end_ == RunEnd::diverged && bad_loss_ == nullptr && skipped_.are_only_above_threshold();
}

IterationMetrics Trainer::train_step(RunEnd wish) {
  start_step(wish);
  settle();
  check_recorded_step();
  const IterationMetrics metrics = settled_.back();
  settled_.pop_back();  // what run() did not report because a callback threw stays
  return metrics;
}

void Trainer::start_step(RunEnd wish) {
  const TraceScope scope([&] { return fmt::format("iteration {}", iteration_ + 1); });
  const auto begin = std::chrono::steady_clock::now();
  const bool follows = in_flight_.has_value();
  if (scale_adapts_itself(config_) && settle()) return;
  if (replay_is_due(iteration_ + 1)) replay();
  telemetry_->begin(follows);
  parallel_state_.begin_step(iteration_ + 1);
  const BatchSizes batch = batches_.at(consumed_samples_);
  loader_->seek(consumed_samples_ + left_out_samples_);
  const double loss_scale = optimizer_->loss_scale();
  const bool warm = ++launched_ > kWarmUp;
  const at::Tensor numbers = recorded_ && warm ? launch_recorded(batch, wish) : launch(batch, wish);
  if (!numbers.defined()) return telemetry_->abandon();
  ++iteration_;
  const std::optional<double> decoupled =
      decoupled_learning_rate(config_.optimizer, scheduler_, scheduled_samples());
  consumed_samples_ += batch.global;
  IterationMetrics metrics = {.iteration = iteration_,
                              .learning_rate = optimizer_->learning_rate(),
                              .consumed_samples = consumed_samples_,
                              .num_tokens = batch.global * config_.model.seq_length,
                              .loss_scale = loss_scale,
                              .decoupled_learning_rate = decoupled};
  telemetry_->note_launched(metrics);
  in_flight_.emplace(InFlight{.metrics = std::move(metrics),
                              .begin = begin,
                              .numbers = Download(numbers),
                              .limits = limits_,
                              .samples = batch.global});
  const int64_t interval = config_.parallel.desync_check_interval;
  if (interval > 0 && iteration_ % interval == 0) parallel_state_.check_in_step();
  remember_state();
}

int64_t Trainer::scheduled_samples() const { return consumed_samples_ - skipped_samples_; }

at::Tensor Trainer::launch(const BatchSizes& batch, RunEnd wish) {
  {
    const InPart zeroing = telemetry_->in(StepPart::optimizer);
    model_->zero_grad_buffer();
  }
  const LossSums local = model_->forward_backward(batch.num_microbatches, optimizer_->loss_scale(),
                                                  [&](int64_t) { return training_batch(); });
  if (settle()) {
    model_->abandon_step();
    return {};
  }
  optimizer_->apply_schedule(scheduler_, scheduled_samples());
  if (before_update_) std::exchange(before_update_, {})();
  if (recorded_) optimizer_->upload_numbers();
  const at::Tensor of_host =
      telemetry_->with_rank_times(host_numbers(local.tokens, wish), iteration_ + 1);
  return update_after(local.loss, upload(of_host, parallel_state_.device()));
}

at::Tensor Trainer::update_after(const at::Tensor& loss, const at::Tensor& of_host) {
  const InPart update = telemetry_->in(StepPart::optimizer);
  model_->finalize_gradients(of_host[0]);
  check_before_update();
  const at::Tensor over_ranks = telemetry_->with_group_norms(sum_over_ranks(loss, of_host, "loss"));
  limits_ = looks_for_spikes() ? spikes_.limits() : SpikeLimits{};
  const Optimizer::StepLimits limits = step_limits(over_ranks);
  const at::Tensor of_optimizer = optimizer_->start_step(limits);
  if (model_->has_fp8()) model_->update_fp8_scales(optimizer_->applies(of_optimizer, limits));
  return at::cat({over_ranks, of_optimizer});
}

at::Tensor Trainer::launch_recorded(const BatchSizes& batch, RunEnd wish) {
  std::vector<BatchInput> inputs;
  double tokens = 0;
  for (int64_t m = 0; m < batch.num_microbatches; ++m) {
    inputs.push_back(training_batch());
    tokens += static_cast<double>(*inputs.back().labels);
  }
  if (settle()) return {};
  optimizer_->apply_schedule(scheduler_, scheduled_samples());
  if (before_update_) std::exchange(before_update_, {})();
  RecordedStep& step = *recorded_;
  if (!step.work.is_recorded() || step.inputs.size() != inputs.size()) record_step(inputs);
  for (size_t m = 0; m < inputs.size(); ++m) step.inputs[m].assign(inputs[m].input);
  upload_to(step.of_host, host_numbers(tokens, wish));
  optimizer_->upload_numbers();
  step.work.launch();
  return step.numbers;
}

void Trainer::record_step(const std::vector<BatchInput>& like) {
  RecordedStep& step = *recorded_;
  model_->finish_param_sync();
  step.inputs.clear();
  for (const BatchInput& batch : like) step.inputs.emplace_back(batch.input, parallel_state_);
  step.of_host = at::empty({2}, at::TensorOptions(parallel_state_.device()).dtype(at::kDouble));
  step.work.record([&] {
    model_->zero_grad_buffer();
    const LossSums local = model_->forward_backward(
        static_cast<int64_t>(like.size()), optimizer_->loss_scale(), [&](int64_t m) {
          return BatchInput(step.inputs[static_cast<size_t>(m)].input(),
                            like[static_cast<size_t>(m)].labels);
        });
    step.numbers = update_after(local.loss, step.of_host);
    model_->finish_param_sync();
  });
}

bool Trainer::settle() {
  if (!in_flight_) return false;
  const at::Tensor numbers = in_flight_->numbers.wait();
  const std::span values(numbers.const_data_ptr<double>(), static_cast<size_t>(numbers.numel()));
  parallel_state_.check_failures();
  const GlobalSums sums = global_sums(values.data());
  const auto of_optimizer = values.last(kStepNumbers);
  const double loss = sums.tokens > 0 ? sums.loss / sums.tokens : 0;
  const SpikeLimits limits = in_flight_->limits;
  const Optimizer::StepResult step =
      optimizer_->finish_step(of_optimizer.data(), limits.exceeded_by(loss, of_optimizer[0]));
  const auto now = std::chrono::steady_clock::now();
  const double seconds =
      std::chrono::duration<double>(now - std::max(in_flight_->begin, settled_at_)).count();
  settled_at_ = now;
  IterationMetrics metrics = in_flight_->metrics;
  if (step.skipped) skipped_samples_ += in_flight_->samples;
  in_flight_.reset();
  metrics.lm_loss = loss;
  metrics.spike = limits.judge(loss, step.grad_norm);
  metrics.grad_norm = step.grad_norm;
  if (const auto counted = static_cast<int64_t>(sums.tokens); counted != metrics.num_tokens)
    metrics.num_loss_tokens = counted;
  metrics.iteration_ms = seconds * 1000;
  metrics.skipped = step.skipped;
  metrics.num_zeros_in_grad = step.num_zeros;
  telemetry_->settle(metrics, values.subspan(kNumSums, values.size() - kNumSums - kStepNumbers));
  metrics.tokens_per_second = static_cast<double>(metrics.num_tokens) / metrics.iteration_ms * 1000;
  metrics_checksum_ = checksum_of_line(to_json(metrics));
  settled_.push_back(metrics);
  skipped_.note(metrics);
  note_spike(metrics);
  bad_loss_ = std::isnan(sums.loss) ? kLoss : nullptr;
  end_ = end_after(metrics.iteration, sums.wish);
  return end_ != RunEnd::none || goes_back_;
}

bool Trainer::may_run_ahead(const TrainCallbacks& callbacks) const {
  if (parallel_state_.device().is_cpu() || iteration_ >= config_.train.train_iters) return false;
  if (optimizer_->is_offloaded()) return false;  // settle() updates
  if (validation_is_due() || replay_is_due(iteration_ + 1)) return false;
  if (recorded_ && replica_check_is_due(iteration_)) return false;
  if (!callbacks.checkpoint) return true;
  return callbacks.checkpoint_is_due && !callbacks.checkpoint_is_due(iteration_);
}

void Trainer::tell_iterations(const TrainCallbacks& callbacks) {
  while (!settled_.empty()) {
    const IterationMetrics metrics = settled_.front();
    settled_.pop_front();
    if (callbacks.iteration) callbacks.iteration(metrics);
  }
}

RunEnd Trainer::run(const TrainCallbacks& callbacks) {
  const TrainConfig& train = config_.train;
  const auto checkpoint = [&](bool last) {
    const bool saves = callbacks.checkpoint &&
                       (!callbacks.checkpoint_is_due || callbacks.checkpoint_is_due(iteration_));
    if ((last || saves) && checks_replicas()) check_replicas();
    if (callbacks.checkpoint) callbacks.checkpoint(last);
  };
  if (iteration_ > 0 && iteration_ >= train.train_iters) return end_ = RunEnd::done;
  end_ = train.train_iters == 0 ? RunEnd::done : RunEnd::none;
  while (end_ == RunEnd::none) {
    start_step(callbacks.should_stop ? callbacks.should_stop() : RunEnd::none);
    tell_iterations(callbacks);
    if (!may_run_ahead(callbacks)) settle();
    tell_iterations(callbacks);
    if (!in_flight_) check_recorded_step();
    if (std::exchange(goes_back_, false) && go_back(callbacks)) continue;
    if (end_ != RunEnd::none || in_flight_) continue;
    if (validation_is_due()) validate_and_tell(callbacks);
    if (end_ == RunEnd::none) checkpoint(/*last=*/false);
  }
  if (is_stop(end_)) checkpoint(/*last=*/true);
  if (end_ != RunEnd::diverged) validate_and_tell(callbacks);
  if (end_ == RunEnd::done) {
    test_and_tell(callbacks);
    checkpoint(/*last=*/true);
  }
  model_->finish_param_sync();
  return end_;
}

}  // namespace lockstep
