#include "lockstep/training/trainer.h"

#include <chrono>
#include <cmath>
#include <cstdlib>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/training/data/token_batch.h"

namespace lockstep {
namespace {

void use_deterministic_operations() {
  // cuBLAS reads it when its first handle is made.
  ::setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
}

TextSplit read_checked_text(const Config& config) {
  TextSplit text = read_text(config.data, config.model.vocab_size);
  const auto tokens = static_cast<int64_t>(text.validation.size());
  require<ConfigError>(
      config.train.eval_iters == 0 || evaluation_windows(tokens, config.model.seq_length) > 0,
      "data.split: the validation text has {} tokens, allowed: more than model.seq_length ({}), or "
      "train.eval_iters = 0",
      tokens, config.model.seq_length);
  return text;
}

std::shared_ptr<GPTModel> make_model(const Config& config, c10::Device device) {
  return std::make_shared<GPTModel>(config.model,
                                    GPTModelOptions{parameter_dtype(config.train.precision), device,
                                                    static_cast<uint64_t>(config.train.seed)});
}

}  // namespace

Trainer::Trainer(const Config& config, const ParallelState& parallel_state)
    : config_(config),
      parallel_state_(parallel_state),
      data_parallel_(parallel_state.group(GroupKind::dp_cp)),
      batch_(batch_sizes(config.train, data_parallel_.size())),
      text_(read_checked_text(config)),
      samples_(static_cast<int64_t>(text_.training.size()), config.model.seq_length,
               static_cast<uint64_t>(config.train.seed)),
      scheduler_(config.optimizer, config.train.train_iters, batch_.global) {
  check_supported(config);
  config_.train.global_batch_size = batch_.global;
  if (config.train.deterministic) use_deterministic_operations();
  model_ = make_model(config, parallel_state.device());
  ddp_ = std::make_unique<DistributedDataParallel>(*model_, parallel_state, config.ddp);
  optimizer_ = make_optimizer({ddp_.get()}, config.optimizer);
}

Trainer::TokenSums Trainer::forward_backward() const {
  const bool per_token = ddp_->scaling_mode() == GradientScalingMode::per_token;
  at::Tensor loss_sum =
      at::zeros({}, at::TensorOptions(parallel_state_.device()).dtype(at::kDouble));
  double tokens = 0;
  for (int64_t m = 0; m < batch_.num_microbatches; ++m) {
    const SampleRange range = microbatch_samples(consumed_samples_, batch_.micro, m,
                                                 data_parallel_.rank(), data_parallel_.size());
    std::vector<int64_t> starts;
    for (int64_t k = range.first; k < range.last; ++k) starts.push_back(samples_.start_of(k));
    const TokenBatch batch = make_token_batch(text_.training, starts, config_.model.seq_length,
                                              parallel_state_.device());
    std::optional<DistributedDataParallel::NoSyncGuard> guard;
    if (m + 1 < batch_.num_microbatches) guard.emplace(ddp_->no_sync());
    const at::Tensor losses = model_->forward(batch.tokens, batch.labels);
    loss_sum += losses.detach().sum(at::kDouble);
    tokens += static_cast<double>(losses.numel());
    const at::Tensor loss =
        per_token ? losses.sum() : losses.mean() / static_cast<double>(batch_.num_microbatches);
    loss.backward();
  }
  return {.loss = loss_sum.item<double>(), .tokens = tokens};
}

Trainer::TokenSums Trainer::sum_over_ranks(const TokenSums& local, const char* label) const {
  at::Tensor sums =
      at::tensor({local.loss, local.tokens, local.stop}, at::kDouble).to(parallel_state_.device());
  all_reduce(data_parallel_, sums, ReduceOp::sum, label).wait();
  sums = sums.cpu();
  const auto* const values = sums.const_data_ptr<double>();
  return {values[0], values[1], values[2]};
}

IterationMetrics Trainer::train_step(bool stop_requested) {
  const auto begin = std::chrono::steady_clock::now();
  parallel_state_.begin_step(iteration_ + 1);
  optimizer_->set_learning_rate(scheduler_.learning_rate(consumed_samples_));
  optimizer_->set_weight_decay(scheduler_.weight_decay(consumed_samples_));
  ddp_->zero_grad_buffer();
  TokenSums local = forward_backward();
  if (ddp_->scaling_mode() == GradientScalingMode::per_token)
    finalize_model_grads({ddp_.get()}, at::full({}, local.tokens, at::kDouble));
  else
    finalize_model_grads({ddp_.get()});
  local.stop = stop_requested ? 1 : 0;
  const TokenSums sums = sum_over_ranks(local, "loss");
  const Optimizer::StepResult step = optimizer_->step();

  ++iteration_;
  const int64_t interval = config_.parallel.desync_check_interval;
  if (interval > 0 && iteration_ % interval == 0) parallel_state_.check_in_step();
  consumed_samples_ += batch_.global;
  stop_requested_ = sums.stop > 0;
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return {.iteration = iteration_,
          .lm_loss = sums.loss / sums.tokens,
          .grad_norm = step.grad_norm,
          .learning_rate = optimizer_->learning_rate(),
          .consumed_samples = consumed_samples_,
          .num_tokens = static_cast<int64_t>(sums.tokens),
          .iteration_ms = seconds * 1000,
          .tokens_per_second = sums.tokens / seconds,
          .skipped = step.skipped};
}

ValidationMetrics Trainer::validate() const {
  const at::NoGradGuard no_grad;
  const int64_t length = config_.model.seq_length;
  const int64_t windows =
      std::min(evaluation_windows(static_cast<int64_t>(text_.validation.size()), length),
               config_.train.eval_iters * batch_.global);
  TokenSums local;
  const int64_t stride = batch_.micro * data_parallel_.size();
  for (int64_t first = batch_.micro * data_parallel_.rank(); first < windows; first += stride) {
    std::vector<int64_t> starts;
    for (int64_t w = first; w < std::min(first + batch_.micro, windows); ++w)
      starts.push_back(w * length);
    const TokenBatch batch =
        make_token_batch(text_.validation, starts, length, parallel_state_.device());
    const at::Tensor losses = model_->forward(batch.tokens, batch.labels);
    local.loss += losses.sum(at::kDouble).item<double>();
    local.tokens += static_cast<double>(losses.numel());
  }
  const TokenSums sums = sum_over_ranks(local, "validation loss");
  const double loss = sums.loss / sums.tokens;
  return {.iteration = iteration_, .validation_loss = loss, .perplexity = std::exp(loss)};
}

void Trainer::run(const TrainCallbacks& callbacks) {
  const TrainConfig& train = config_.train;
  const auto evaluate = [&] {
    if (train.eval_iters == 0) return;
    const ValidationMetrics metrics = validate();
    if (callbacks.validation) callbacks.validation(metrics);
  };
  while (iteration_ < train.train_iters && !stop_requested_) {
    const IterationMetrics metrics = train_step(callbacks.should_stop && callbacks.should_stop());
    if (callbacks.iteration) callbacks.iteration(metrics);
    const bool last = stop_requested_ || iteration_ == train.train_iters;
    if (!last && train.eval_interval && iteration_ % *train.eval_interval == 0) evaluate();
  }
  evaluate();
  ddp_->finish_param_sync();
}

}  // namespace lockstep
