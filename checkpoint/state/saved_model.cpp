#include "lockstep/checkpoint/saved_model.h"

#include <ATen/ATen.h>

#include "lockstep/checkpoint/checkpoint_reader.h"
#include "lockstep/checkpoint/checkpoint_saver.h"
#include "lockstep/checkpoint/folder_lock.h"
#include "lockstep/checkpoint/training_state.h"
#include "lockstep/core/config_io.h"

namespace lockstep {

std::string save_model(const std::string& folder, int64_t iteration, const Config& config,
                       const GPTModel& model) {
  const ParallelState state = ParallelState::single_process();
  const FolderLock lock(folder);
  CheckpointSaver saver(state, {.folder = folder});
  TrainingProgress progress;
  progress.iteration = iteration;
  return saver.save(model_state(model, state), progress, config).path;
}

namespace {

SavedModel read_model(CheckpointReader& checkpoint, c10::Device device) {
  const Config config = resolve_for_device(checkpoint.config(), device.is_cpu());
  GPTModelOptions options;
  options.dtype = config.train.precision == Precision::fp64 ? at::kDouble : at::kFloat;
  options.device = device;
  auto model = std::make_shared<GPTModel>(config.model, options);
  const ParallelState state = ParallelState::single_process();
  const auto targets = model_state(*model, state);
  load_state(checkpoint, targets);
  check_no_weight_left(checkpoint, targets, state);
  check_weights_are_finite(checkpoint.path(), targets, state);
  model->eval();
  return {config, model, checkpoint.path()};
}

}  // namespace

SavedModel load_model(const std::string& folder, c10::Device device) {
  SavedModel saved;
  with_newest_checkpoint(folder, [&](CheckpointReader& checkpoint) {
    saved = read_model(checkpoint, device);
    return true;
  });
  return saved;
}

}  // namespace lockstep
