#include <iterator>

#include "lockstep/core/check.h"
#include "lockstep/training/trainer.h"

namespace lockstep {

std::vector<StateTensor> Trainer::state(bool with_optimizer) {
  settle();
  model_->unshard();
  std::vector<StateTensor> list;
  for (const auto& chunk : model_->chunks()) {
    std::vector<StateTensor> weights = model_state(*chunk, parallel_state_);
    list.insert(list.end(), std::make_move_iterator(weights.begin()),
                std::make_move_iterator(weights.end()));
  }
  if (!with_optimizer) return list;
  std::vector<StateTensor> optimizer = optimizer_state(*optimizer_, parallel_state_);
  list.insert(list.end(), std::make_move_iterator(optimizer.begin()),
              std::make_move_iterator(optimizer.end()));
  return list;
}

TrainingProgress Trainer::progress() {
  settle();
  return {iteration_, consumed_samples_, skipped_steps_, optimizer_->progress(), metrics_checksum_};
}

void Trainer::load(CheckpointReader& checkpoint, bool weights_only) {
  read(checkpoint, weights_only);
  go_on_from(checkpoint, weights_only);
}

void Trainer::read(CheckpointReader& checkpoint, bool weights_only) {
  require<FileError>(weights_only || has_optimizer_state(checkpoint.manifest()),
                     "'{}' holds no state of the optimizer; checkpoint.finetune = true loads its "
                     "weights alone",
                     checkpoint.path());
  load_state(checkpoint, state(/*with_optimizer=*/!weights_only));
}

void Trainer::go_on_from(const CheckpointReader& checkpoint, bool weights_only) {
  check_weights_are_finite(checkpoint.path(), state(/*with_optimizer=*/!weights_only),
                           parallel_state_);
  if (weights_only) return optimizer_->reload_model_params();
  const Manifest& manifest = checkpoint.manifest();
  OptimizerProgress progress = optimizer_->progress();
  progress.num_steps = manifest.optimizer_steps;
  if (manifest.scaler && scale_adapts_itself(config_))
    progress.scaler = {manifest.scaler->scale, manifest.scaler->growth_tracker,
                       manifest.scaler->hysteresis_tracker};
  optimizer_->restore(progress);
  iteration_ = manifest.iteration;
  consumed_samples_ = manifest.consumed_samples;
  skipped_steps_ = manifest.skipped_steps;
  metrics_checksum_ = manifest.metrics_checksum;
}

}  // namespace lockstep
