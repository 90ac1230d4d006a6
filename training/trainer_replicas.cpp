#include <iterator>
#include <set>

#include "lockstep/core/check.h"
#include "lockstep/training/trainer.h"

namespace lockstep {
namespace {

std::string before_update_of(int64_t iteration) {
  return fmt::format("iteration {}, before its update", iteration);
}

}  // namespace

bool Trainer::checks_replicas() const {
  if (parallel_state_.device().is_meta()) return false;  // a planned rank has no values
  return config_.train.replica_check_interval.has_value();
}

bool Trainer::replica_check_is_due(int64_t iteration) const {
  return checks_replicas() && iteration > 0 &&
         iteration % *config_.train.replica_check_interval == 0;
}

ReplicaCheck& Trainer::state_check() {
  if (state_check_) return *state_check_;
  std::vector<StateTensor> tensors = optimizer_state(*optimizer_, parallel_state_);
  const auto add = [&](std::vector<StateTensor> weights) {
    std::move(weights.begin(), weights.end(), std::back_inserter(tensors));
  };
  std::set<std::string> written;  // when gradients are finalized
  const bool sharded =
      config_.ddp.data_parallel_sharding_strategy == ShardingStrategy::optim_grads_params;
  if (sharded) add(kept_weights(model_->wrappers(), parallel_state_));
  for (const auto& chunk : model_->chunks()) {
    add(sharded ? untrained_state(*chunk, parallel_state_) : model_state(*chunk, parallel_state_));
    for (const auto& buffer : chunk->named_buffers()) written.insert(buffer.key());
  }
  state_check_ = std::make_unique<ReplicaCheck>(std::move(tensors), parallel_state_, written);
  return *state_check_;
}

void Trainer::check_replicas() {
  settle();
  if (compared_after_ == iteration_) return;
  model_->finish_param_sync();
  state_check().compare(fmt::format("after iteration {}", iteration_));
  compared_after_ = iteration_;
}

void Trainer::check_recorded_step() {
  if (recorded_ && replica_check_is_due(iteration_)) check_replicas();
}

void Trainer::check_before_update() {
  if (recorded_ || !replica_check_is_due(iteration_ + 1)) return;
  model_->finish_param_sync();
  state_check().compare(before_update_of(iteration_ + 1));
  if (!gradient_check_)
    gradient_check_ = std::make_unique<ReplicaCheck>(
        whole_gradients(model_->wrappers(), parallel_state_), parallel_state_);
  if (gradient_check_->num_shared() > 0) gradient_check_->compare(before_update_of(iteration_ + 1));
}

void Trainer::remember_state() {
  if (recorded_) return;
  if (!replica_check_is_due(iteration_ + 1)) return forget_state();
  if (optimizer_->is_offloaded()) settle();  // settle() makes the update
  state_check().remember();
}

void Trainer::forget_state() {
  if (state_check_) state_check_->forget();
}

}  // namespace lockstep
