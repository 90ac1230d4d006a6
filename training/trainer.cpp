#include "lockstep/training/trainer.h"

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <utility>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/core/integers.h"
#include "lockstep/core/upload.h"
#include "lockstep/datasets/token_batch.h"
#include "lockstep/models/context_parallel.h"
#include "lockstep/models/cross_entropy.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {
namespace {

constexpr const char *kLoss = "loss", *kValidationLoss = "validation loss";
constexpr int64_t kNumSums = 3;  // loss, tokens, wishes for the end

void use_deterministic_operations() {
  // cuBLAS reads it when its first handle is made.
  ::setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  // Nothing reads memory before it is written; filling it would cost a pass over each new tensor.
  at::globalContext().setDeterministicFillUninitializedMemory(false);
}

SampleSources open_checked_samples(const Config& config) {
  const int64_t length = config.model.seq_length;
  SampleSources sources = open_samples(config.data, config.model.vocab_size, length,
                                       static_cast<uint64_t>(config.train.seed));
  require<ConfigError>(
      config.train.eval_iters == 0 || sources.validation->size() > 0,
      "data.split: the validation text has no sample, which takes more tokens than "
      "model.seq_length ({}); allowed: one or more, or train.eval_iters = 0",
      length);
  return sources;
}

std::optional<double> decoupled_learning_rate(const OptimizerConfig& config,
                                              const OptimizerParamScheduler& scheduler,
                                              int64_t samples) {
  if (!config.decoupled_lr) return {};
  return scheduler.learning_rate(samples, *config.decoupled_lr,
                                 config.decoupled_min_lr.value_or(config.min_lr));
}

Config checked(const Config& config, const ParallelState& parallel_state) {
  check_supported(config);
  check_layout(config, parallel_state.world_size());
  return resolve_for_device(config, parallel_state.device().is_cpu());
}

}  // namespace

Trainer::Trainer(const Config& config, const ParallelState& parallel_state)
    : config_(checked(config, parallel_state)),
      parallel_state_(parallel_state),
      data_parallel_rank_(
          *parallel_state.grids().groups(GroupKind::dp).position_of(parallel_state.rank())),
      data_parallel_size_(parallel_state.grids().data_parallel_size()),
      batches_(config.train, data_parallel_size_),
      scheduler_(config.optimizer, config.train.train_iters, batches_.full().global) {
  SampleSources sources = open_checked_samples(config);
  validation_ = std::move(sources.validation);
  loader_ = std::make_unique<MicrobatchLoader>(
      std::move(sources.training), batches_,
      MicrobatchLoader::Options{.seq_length = config.model.seq_length,
                                .rank = data_parallel_rank_,
                                .ranks = data_parallel_size_,
                                .prefetch = config.data.prefetch});
  if (!config.train.step_batch_size_schedule)
    config_.train.global_batch_size = batches_.full().global;
  if (config.train.deterministic) use_deterministic_operations();
  model_ = std::make_unique<TrainingModel>(config_, parallel_state);
  optimizer_ = make_optimizer(model_->wrappers(), config.optimizer);
}

GPTInput Trainer::make_input(const std::vector<int64_t>& ids) const {
  const TokenBatch batch =
      make_token_batch(ids, config_.model.seq_length, parallel_state_.device());
  const ProcessGroup cp = parallel_state_.group(GroupKind::cp);
  return {.tokens = cut_for_context(batch.tokens, 1, cp),
          .labels = cut_for_context(batch.labels, 1, cp)};
}

BatchInput Trainer::training_batch() {
  const Microbatch microbatch = loader_->next();
  GPTInput input = make_input(microbatch.ids);
  input.positions.first_sample = microbatch.samples.first;
  const int64_t labels = input.labels.numel();
  return {std::move(input), labels};
}

GPTInput Trainer::validation_batch(const std::vector<int64_t>& samples) const {
  const auto length = static_cast<size_t>(config_.model.seq_length + 1);
  std::vector<int64_t> ids(samples.size() * length);
  for (size_t i = 0; i < samples.size(); ++i)
    validation_->read(samples[i], std::span(ids).subspan(i * length, length));
  return make_input(ids);
}

at::Tensor Trainer::sum_over_ranks(const LossSums& local, RunEnd wish, const char* label) const {
  const RankGrids& grids = parallel_state_.grids();
  const bool counts = grids.groups(GroupKind::tp).position_of(parallel_state_.rank()) == 0;
  const int64_t ranks = parallel_state_.world_size();
  const at::Tensor of_host =
      at::tensor({counts ? local.tokens : 0, wish_for_end(wish, ranks)}, at::kDouble);
  at::Tensor sums = at::cat({(counts ? local.loss : at::zeros_like(local.loss)).view({1}),
                             upload(of_host, parallel_state_.device())});
  all_reduce(parallel_state_.world(), sums, ReduceOp::sum, label).wait();
  return sums;
}

Trainer::GlobalSums Trainer::global_sums(const double* values) const {
  return {values[0], values[1], agreed_end(values[2], parallel_state_.world_size())};
}

RunEnd Trainer::end_after(RunEnd wish) const {
  if (bad_loss_ != nullptr || skipped_steps_ >= config_.train.max_skipped_steps)
    return RunEnd::diverged;
  return iteration_ >= config_.train.train_iters ? RunEnd::done : wish;
}

std::string Trainer::divergence() const {
  if (bad_loss_ != nullptr)
    return fmt::format("iteration {}: the {} is not a number", iteration_, bad_loss_);
  return fmt::format(
      "iterations {} to {}: found {} skipped steps in a row, whose gradients are not finite, "
      "allowed: fewer than train.max_skipped_steps = {}",
      iteration_ - skipped_steps_ + 1, iteration_, skipped_steps_, config_.train.max_skipped_steps);
}

int64_t Trainer::last_good_iteration() const {
  const bool tried = bad_loss_ == kLoss || skipped_steps_ > 0;  // the weights from before the steps
  return iteration_ - std::max<int64_t>(1, skipped_steps_) -
         (tried && !loss_scale_is_in_doubt() ? 1 : 0);
}

bool Trainer::loss_scale_is_in_doubt() const {
  return bad_loss_ == nullptr && skipped_steps_ > 0 && optimizer_->loss_scale() > 1;
}

IterationMetrics Trainer::train_step(RunEnd wish) {
  const auto begin = std::chrono::steady_clock::now();
  parallel_state_.begin_step(iteration_ + 1);
  optimizer_->apply_schedule(scheduler_, consumed_samples_);
  const std::optional<double> decoupled_rate =
      decoupled_learning_rate(config_.optimizer, scheduler_, consumed_samples_);
  const BatchSizes batch = batches_.at(consumed_samples_);
  loader_->seek(consumed_samples_);
  model_->zero_grad_buffer();
  const LossSums local = model_->forward_backward(batch.num_microbatches, optimizer_->loss_scale(),
                                                  [&](int64_t) { return training_batch(); });
  if (before_update_) std::exchange(before_update_, {})();
  model_->finalize_gradients(local.tokens);
  const at::Tensor over_ranks = sum_over_ranks(local, wish, "loss");
  const double loss_scale = optimizer_->loss_scale();
  // The only place where the host waits for the device.
  const at::Tensor numbers = at::cat({over_ranks, optimizer_->start_step()}).cpu();
  parallel_state_.check_failures();
  const auto* const values = numbers.const_data_ptr<double>();
  const GlobalSums sums = global_sums(values);
  const Optimizer::StepResult step = optimizer_->finish_step(values + kNumSums);

  ++iteration_;
  const int64_t interval = config_.parallel.desync_check_interval;
  if (interval > 0 && iteration_ % interval == 0) parallel_state_.check_in_step();
  consumed_samples_ += batch.global;
  skipped_steps_ = step.skipped ? skipped_steps_ + 1 : 0;
  bad_loss_ = std::isnan(sums.loss) ? kLoss : nullptr;
  end_ = end_after(sums.wish);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  const IterationMetrics metrics = {.iteration = iteration_,
                                    .lm_loss = sums.loss / sums.tokens,
                                    .grad_norm = step.grad_norm,
                                    .learning_rate = optimizer_->learning_rate(),
                                    .consumed_samples = consumed_samples_,
                                    .num_tokens = static_cast<int64_t>(sums.tokens),
                                    .iteration_ms = seconds * 1000,
                                    .tokens_per_second = sums.tokens / seconds,
                                    .skipped = step.skipped,
                                    .num_zeros_in_grad = step.num_zeros,
                                    .loss_scale = loss_scale,
                                    .decoupled_learning_rate = decoupled_rate};
  metrics_checksum_ = checksum_of_line(to_json(metrics));
  return metrics;
}

ValidationMetrics Trainer::validate() const {
  const BatchSizes& batch = batches_.full();
  const int64_t all = validation_->size(), iterations = config_.train.eval_iters;
  const int64_t windows = iterations > all / batch.global ? all : iterations * batch.global;
  const int64_t stride = batch.micro * data_parallel_size_;
  const int64_t first = batch.micro * data_parallel_rank_;
  // The experts of all ranks work on each micro-batch: a rank that lacks windows repeats the first.
  const bool fill = config_.model.num_experts.has_value();
  const int64_t needed = first < windows ? ceil_div(windows - first, stride) : 0;
  const int64_t num_microbatches = fill ? ceil_div(windows, stride) : needed;
  LossSums local = {
      .loss = at::zeros({}, at::TensorOptions(parallel_state_.device()).dtype(at::kDouble))};
  if (num_microbatches > 0)
    local = model_->evaluate(num_microbatches, [&](int64_t m) {
      const int64_t begin = first + m * stride;
      std::vector<int64_t> samples;
      for (int64_t w = begin; w < std::min(begin + batch.micro, windows); ++w) samples.push_back(w);
      const auto counted = static_cast<int64_t>(samples.size());
      if (fill) samples.resize(static_cast<size_t>(batch.micro), 0);
      GPTInput input = validation_batch(samples);
      if (counted < input.labels.size(0)) {
        input.labels = input.labels.clone();  // tokens share its memory
        input.labels.slice(0, counted).fill_(kIgnoredLabel);
      }
      const int64_t labels = counted * input.labels.size(1);
      return BatchInput(std::move(input), labels);
    });
  const at::Tensor over_ranks = sum_over_ranks(local, RunEnd::none, "validation loss").cpu();
  parallel_state_.check_failures();
  const GlobalSums sums = global_sums(over_ranks.const_data_ptr<double>());
  const double loss = sums.loss / sums.tokens;
  return {.iteration = iteration_, .validation_loss = loss, .perplexity = std::exp(loss)};
}

void Trainer::validate_and_tell(const TrainCallbacks& callbacks) {
  if (config_.train.eval_iters == 0) return;
  const ValidationMetrics metrics = validate();
  if (callbacks.validation) callbacks.validation(metrics);
  if (!std::isnan(metrics.validation_loss)) return;
  bad_loss_ = kValidationLoss;
  end_ = RunEnd::diverged;
}

RunEnd Trainer::run(const TrainCallbacks& callbacks) {
  const TrainConfig& train = config_.train;
  const auto checkpoint = [&](bool last) {
    if (callbacks.checkpoint) callbacks.checkpoint(last);
  };
  if (iteration_ > 0 && iteration_ >= train.train_iters) return end_ = RunEnd::done;
  end_ = train.train_iters == 0 ? RunEnd::done : RunEnd::none;
  while (end_ == RunEnd::none) {
    const IterationMetrics metrics =
        train_step(callbacks.should_stop ? callbacks.should_stop() : RunEnd::none);
    if (callbacks.iteration) callbacks.iteration(metrics);
    if (end_ != RunEnd::none) break;
    if (train.eval_interval && iteration_ % *train.eval_interval == 0) validate_and_tell(callbacks);
    if (end_ == RunEnd::none) checkpoint(/*last=*/false);
  }
  if (is_stop(end_)) checkpoint(/*last=*/true);
  if (end_ != RunEnd::diverged) validate_and_tell(callbacks);
  if (end_ == RunEnd::done) checkpoint(/*last=*/true);
  model_->finish_param_sync();
  return end_;
}

}  // namespace lockstep
