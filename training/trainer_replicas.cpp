#include <iterator>

#include "lockstep/core/check.h"
#include "lockstep/training/trainer.h"

namespace lockstep {

bool Trainer::replica_check_is_due(int64_t iteration) const {
  const std::optional<int64_t>& interval = config_.train.replica_check_interval;
  if (parallel_state_.device().is_meta()) return false;  // a planned rank has no values
  return interval && iteration > 0 && iteration % *interval == 0;
}

void Trainer::check_replicas() {
  settle();
  if (compared_after_ == iteration_) return;
  model_->finish_param_sync();
  if (!state_check_) {
    std::vector<StateTensor> tensors = optimizer_state(*optimizer_, parallel_state_);
    if (config_.ddp.data_parallel_sharding_strategy != ShardingStrategy::optim_grads_params)
      for (const auto& chunk : model_->chunks()) {
        std::vector<StateTensor> weights = model_state(*chunk, parallel_state_);
        std::move(weights.begin(), weights.end(), std::back_inserter(tensors));
      }
    state_check_ = std::make_unique<ReplicaCheck>(std::move(tensors), parallel_state_);
  }
  state_check_->compare(fmt::format("after iteration {}", iteration_));
  compared_after_ = iteration_;
}

void Trainer::check_unchanged() {
  if (!replica_check_is_due(iteration_) || compared_after_ != iteration_ || recorded_) return;
  state_check_->unchanged(fmt::format("iteration {}, before its update", iteration_ + 1));
}

void Trainer::check_gradients() {
  if (!replica_check_is_due(iteration_ + 1) || recorded_) return;
  if (!gradient_check_)
    gradient_check_ = std::make_unique<ReplicaCheck>(
        whole_gradients(model_->wrappers(), parallel_state_), parallel_state_);
  gradient_check_->compare(fmt::format("iteration {}, before its update", iteration_ + 1));
}

}  // namespace lockstep
