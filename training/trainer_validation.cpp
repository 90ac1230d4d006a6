#include <cmath>

#include <ATen/ATen.h>

#include "lockstep/core/integers.h"
#include "lockstep/core/upload.h"
#include "lockstep/training/batch_input.h"
#include "lockstep/training/trainer.h"

namespace lockstep {

BatchInput Trainer::evaluation_batch(SampleSource& source, const std::vector<int64_t>& samples,
                                     int64_t counted) const {
  const auto length = static_cast<size_t>(config_.model.seq_length + 1);
  std::vector<int64_t> ids(samples.size() * length);
  std::vector<SampleMarks> marks;
  for (size_t i = 0; i < samples.size(); ++i) {
    const std::span<int64_t> of_sample = std::span(ids).subspan(i * length, length);
    source.read(samples[i], of_sample);
    marks.push_back(source.marks(samples[i], of_sample));
  }
  return make_batch_input(ids, marks, config_.model.seq_length, counted, parallel_state_);
}

double Trainer::mean_loss(SampleSource& source, const char* label) const {
  const BatchSizes& batch = batches_.full();
  const int64_t all = source.size(), iterations = config_.train.eval_iters;
  const int64_t windows = iterations > all / batch.global ? all : iterations * batch.global;
  const int64_t stride = batch.micro * data_parallel_size_;
  const int64_t first = batch.micro * data_parallel_rank_;
  // The experts of all ranks work on each micro-batch, and all ranks gather sharded parameters
  // together: a rank that lacks windows repeats the first.
  const bool fill =
      config_.model.num_experts.has_value() ||
      config_.ddp.data_parallel_sharding_strategy == ShardingStrategy::optim_grads_params;
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
      return evaluation_batch(source, samples, counted);
    });
  const at::Tensor of_host =
      upload(host_numbers(local.tokens, RunEnd::none), parallel_state_.device());
  const at::Tensor over_ranks = sum_over_ranks(local.loss, of_host, label).cpu();
  parallel_state_.check_failures();
  const GlobalSums sums = global_sums(over_ranks.const_data_ptr<double>());
  return sums.tokens > 0 ? sums.loss / sums.tokens : 0;
}

ValidationMetrics Trainer::validate() const {
  const double loss = mean_loss(*validation_, "validation loss");
  return {.iteration = iteration_, .validation_loss = loss, .perplexity = std::exp(loss)};
}

void Trainer::validate_and_tell(const TrainCallbacks& callbacks) {
  if (config_.train.eval_iters == 0) return;
  const ValidationMetrics metrics = validate();
  if (callbacks.validation) callbacks.validation(metrics);
  if (!std::isnan(metrics.validation_loss)) return;
  bad_loss_ = "validation loss";
  end_ = RunEnd::diverged;
}

void Trainer::test_and_tell(const TrainCallbacks& callbacks) {
  if (!test_ || config_.train.eval_iters == 0) return;
  const double loss = mean_loss(*test_, "test loss");
  if (callbacks.test)
    callbacks.test({.iteration = iteration_, .test_loss = loss, .test_perplexity = std::exp(loss)});
}

bool Trainer::validation_is_due() const {
  const std::optional<int64_t> interval = config_.train.eval_interval;
  return interval && iteration_ % *interval == 0;
}

}  // namespace lockstep
