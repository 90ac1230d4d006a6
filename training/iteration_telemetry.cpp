#include "lockstep/training/iteration_telemetry.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "lockstep/planner/device_peak.h"
#include "lockstep/planner/model_flops.h"
#include "lockstep/training/memory_use.h"

namespace lockstep {
namespace {

std::optional<double> peak_of(const TrainConfig& train, c10::Device device) {
  if (train.peak_tflops_per_device || !device.is_cuda()) return train.peak_tflops_per_device;
  return peak_tflops(gpu_model(), train.precision);
}

}  // namespace

IterationTelemetry::IterationTelemetry(const Config& config, const ParallelState& parallel_state,
                                       const Optimizer& optimizer)
    : optimizer_(optimizer),
      parallel_state_(parallel_state),
      times_steps_(config.train.log_step_times && config.train.cuda_graph == CudaGraph::none),
      log_interval_(config.train.log_interval),
      flops_per_token_(model_flops_per_token(config)),
      peak_tflops_(peak_of(config.train, parallel_state.device())) {
  if (config.train.log_grad_norm_per_group)
    group_norms_ = std::make_unique<GroupGradNorms>(optimizer);
}

IterationTelemetry::~IterationTelemetry() { clock().reset(); }

void IterationTelemetry::begin(bool follows) {
  if (times_steps_) clock().begin(follows);
}

void IterationTelemetry::note_launched(IterationMetrics& metrics) {
  if (!parallel_state_.device().is_cpu()) clock().end();
  const std::vector<ParamGroup>& groups = optimizer_.param_groups();
  for (const ParamGroup& group : groups)
    if (groups.size() > 1)
      metrics.learning_rates.push_back({name_of(group, groups.front()), group.lr});
}

at::Tensor IterationTelemetry::with_rank_times(const at::Tensor& numbers, int64_t iteration) {
  const int64_t ranks = parallel_state_.world_size();
  if (ranks == 1 || rank_times_.empty() || iteration % log_interval_ != 0) return numbers;
  at::Tensor payload = at::empty({RankTimes::payload_size(ranks)}, at::kDouble);
  rank_times_.take({payload.mutable_data_ptr<double>(), static_cast<size_t>(payload.numel())},
                   parallel_state_.rank());
  return at::cat({numbers, payload});
}

at::Tensor IterationTelemetry::with_group_norms(const at::Tensor& numbers) const {
  return group_norms_ ? at::cat({numbers, group_norms_->norms()}) : numbers;
}

void IterationTelemetry::settle(IterationMetrics& metrics, std::span<const double> appended) {
  if (parallel_state_.device().is_cpu()) clock().end();
  if (clock().has_ended_step()) {
    metrics.times = clock().take();
    if (optimizer_.is_offloaded())  // the host has updated meanwhile; the device waited
      (*metrics.times)[StepPart::optimizer] +=
          std::max(0.0, metrics.iteration_ms - metrics.times->total());
    metrics.iteration_ms = metrics.times->total();
    rank_times_.add(metrics.iteration, *metrics.times);
  }
  const size_t groups = group_norms_ ? group_norms_->names().size() : 0;
  const std::span rank_times = appended.first(appended.size() - groups);
  if (!rank_times.empty()) metrics.slowest_rank = rank_times_.compare(rank_times);
  for (size_t i = 0; i < groups; ++i)
    metrics.grad_norms.push_back({group_norms_->names()[i], appended.last(groups)[i]});
  const double flops = flops_per_token_ * static_cast<double>(metrics.num_tokens);
  const double of_device = flops / static_cast<double>(parallel_state_.world_size());
  metrics.model_tflops_per_device = of_device / (metrics.iteration_ms * 1e9);
  if (peak_tflops_) metrics.utilisation = *metrics.model_tflops_per_device / *peak_tflops_;
  const MemoryUse memory = memory_use(parallel_state_.device());
  metrics.memory_bytes = memory.bytes;
  metrics.peak_memory_bytes = memory.peak_bytes;
}

}  // namespace lockstep
