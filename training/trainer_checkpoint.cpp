#include <algorithm>
#include <iterator>
#include <set>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/core/optimizer_rules.h"
#include "lockstep/training/trainer.h"

namespace lockstep {
namespace {

std::set<std::string> trained_names(const TrainingModel& model) {
  std::set<std::string> names;
  for (const auto& chunk : model.chunks())
    for (const NamedParameter& param : collect_parameters(*chunk))
      if (param.tensor.requires_grad()) names.insert(param.name);
  return names;
}

/// Loads a tensor of fp8 scales. It starts from scratch if the checkpoint has none, and takes the
/// newest steps of a history of another length.
void load_fp8_state(CheckpointReader& checkpoint, const StateTensor& target) {
  at::Tensor(target.values).zero_();
  const ManifestTensor* const saved = checkpoint.find(target.name, target.state);
  if (saved == nullptr) return;
  const std::vector<int64_t>& shape = target.part.box.shape;
  if (saved->shape == shape) return load_state(checkpoint, {target});
  require<FileError>(saved->shape.size() == 2 && shape.size() == 2 && saved->shape[0] == shape[0],
                     "'{}': tensor '{}' of '{}': found shape [{}], allowed: [{}, steps]",
                     checkpoint.path(), target.state, target.name, fmt::join(saved->shape, ", "),
                     shape[0]);
  const TensorBox box = whole_box(saved->shape);
  const at::Tensor whole = at::zeros({box.numel()}, target.values.options());
  load_state(checkpoint, {{target.name, target.state, {box, {0, box.numel()}}, whole}});
  const int64_t steps = std::min(shape[1], saved->shape[1]);
  target.values.view(shape).narrow(1, 0, steps).copy_(whole.view(saved->shape).narrow(1, 0, steps));
}

/// The largest gradients of outputs contain the loss scale, which is `ratio` times that of the
/// checkpoint.
void adapt_to_loss_scale(const StateTensor& fp8, double ratio) {
  const auto place = static_cast<int64_t>(Fp8Operand::output_gradient);
  const at::Tensor of_gradients = fp8.values.view({kFp8Operands, -1}).select(0, place);
  if (fp8.state == "fp8_scales")
    of_gradients.div_(ratio);
  else
    of_gradients.mul_(ratio);
}

}  // namespace

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
  std::vector<StateTensor> fp8 = model_->fp8_state();
  list.insert(list.end(), std::make_move_iterator(fp8.begin()), std::make_move_iterator(fp8.end()));
  return list;
}

TrainingProgress Trainer::progress() {
  settle();
  TrainingProgress progress = {iteration_, consumed_samples_, skipped_.count(),
                               optimizer_->progress(), metrics_checksum_};
  progress.skipped_samples = skipped_samples_;
  progress.spikes = {spikes_.losses(), spikes_.grad_norms(), left_out_samples_, came_from_};
  return progress;
}

void Trainer::load(CheckpointReader& checkpoint, bool weights_only) {
  read(checkpoint, weights_only);
  go_on_from(checkpoint, weights_only);
}

void Trainer::read(CheckpointReader& checkpoint, bool weights_only) {
  std::vector<StateTensor> targets = state(/*with_optimizer=*/!weights_only);
  const bool has_state = std::any_of(targets.begin(), targets.end(), [](const StateTensor& one) {
    return !one.state.empty() && !one.state.starts_with("fp8_");
  });
  require<FileError>(weights_only || !has_state || has_optimizer_state(checkpoint.manifest()),
                     "'{}' holds no optimizer state; checkpoint.finetune = true loads only its "
                     "weights",
                     checkpoint.path());
  if (starts_adapters(checkpoint)) {
    const std::set<std::string> adapters = trained_names(*model_);
    std::erase_if(targets, [&](const StateTensor& one) { return adapters.contains(one.name); });
  }
  const auto of_fp8 =
      std::stable_partition(targets.begin(), targets.end(),
                            [](const StateTensor& one) { return !one.state.starts_with("fp8_"); });
  const double ratio =
      optimizer_->loss_scale() / checkpoint.config().optimizer.loss_scale.value_or(1);
  std::for_each(of_fp8, targets.end(), [&](const StateTensor& one) {
    load_fp8_state(checkpoint, one);
    if (ratio != 1) adapt_to_loss_scale(one, ratio);
  });
  targets.erase(of_fp8, targets.end());
  load_state(checkpoint, targets);
  model_->look_at_fp8_scales();
}

bool Trainer::starts_adapters(CheckpointReader& checkpoint) const {
  return config_.lora.rank && !checkpoint.config().lora.rank;
}

void Trainer::go_on_from(const CheckpointReader& checkpoint, bool weights_only) {
  compared_after_ = {};
  forget_state();
  check_weights_are_finite(checkpoint.path(), state(/*with_optimizer=*/!weights_only),
                           parallel_state_);
  if (weights_only) return optimizer_->reload_model_params();
  const Manifest& manifest = checkpoint.manifest();
  OptimizerProgress progress = optimizer_->progress();
  progress.num_steps = manifest.optimizer_steps;
  if (manifest.scaler && scale_adapts_itself(config_))
    progress.scaler = GradScalerState{manifest.scaler->scale, manifest.scaler->growth_tracker,
                                      manifest.scaler->hysteresis_tracker};
  optimizer_->restore(progress);
  iteration_ = manifest.iteration;
  consumed_samples_ = manifest.consumed_samples;
  skipped_samples_ = manifest.skipped_samples;
  skipped_.restore(manifest.skipped_steps);
  metrics_checksum_ = manifest.metrics_checksum;
  left_out_samples_ = manifest.spikes.left_out_samples;
  spikes_.restore(manifest.spikes.losses, manifest.spikes.grad_norms);
  if (manifest.spikes.came_from) came_from_ = manifest.spikes.came_from;
}

}  // namespace lockstep
