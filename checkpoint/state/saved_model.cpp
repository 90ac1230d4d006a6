#include "lockstep/checkpoint/saved_model.h"

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/checkpoint_reader.h"
#include "lockstep/checkpoint/checkpoint_saver.h"
#include "lockstep/checkpoint/folder_lock.h"
#include "lockstep/checkpoint/moved_tokenizer.h"
#include "lockstep/checkpoint/shared_checkpoint.h"
#include "lockstep/checkpoint/training_state.h"
#include "lockstep/core/config_io.h"
#include "lockstep/planner/stage_shapes.h"

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

GPTStage stage_of_rank(const Config& config, const ParallelState& state) {
  return chunks_of_stage(config, state.group(GroupKind::pp).rank()).front().stage();
}

/// What the callers of load_model() choose.
struct Loading {
  const ParallelConfig* parallel;  ///< null: the whole model
  c10::Device device;
  std::optional<LogitsLimit> limit = {};
};

void limit_logits(TransformerConfig& model, const LogitsLimit& limit) {
  const int64_t most = std::max<int64_t>(1, limit.logits / model.vocab_size);
  if (most >= std::max(limit.tokens, model.seq_length)) return;
  model.cross_entropy_chunk_size = std::min(model.cross_entropy_chunk_size.value_or(most), most);
}

/// Nothing if the checkpoint was removed meanwhile.
std::optional<SavedModel> read_model(SharedCheckpoint& checkpoint, const Loading& loading,
                                     const ParallelState& state) {
  const auto& [parallel, device, limit] = loading;
  Config config;
  const bool opened = checkpoint.read([&](CheckpointReader& reader) {
    config = reader.config();
    config.data.tokenizer = find_moved_tokenizer(config.data.tokenizer, reader.path());
  });
  if (!opened) return std::nullopt;
  if (parallel != nullptr) config.parallel = *parallel;
  config.model.moe_expert_capacity_factor.reset();
  config.model.moe_pad_expert_input_to_capacity = false;
  // Only training saves activations, and this layout may have no tp ranks to share them.
  config.model.distribute_saved_activations = false;
  if (limit) limit_logits(config.model, *limit);
  config = resolve_for_device(config, device.is_cpu());
  GPTModelOptions options;
  options.dtype = config.train.precision == Precision::fp64 ? at::kDouble : at::kFloat;
  options.device = device;
  options.lora = config.lora;
  options.perform_initialization = false;
  const auto model = parallel == nullptr
                         ? std::make_shared<GPTModel>(config.model, options)
                         : std::make_shared<GPTModel>(config.model, config.parallel, state,
                                                      stage_of_rank(config, state), options);
  const auto targets = model_state(*model, state);
  check_no_weight_left(checkpoint.reader(), targets, state);
  if (!checkpoint.read([&](CheckpointReader& reader) { load_state(reader, targets); }))
    return std::nullopt;
  check_weights_are_finite(checkpoint.reader().path(), targets, state);
  model->eval();
  return SavedModel{config, model, checkpoint.reader().path()};
}

SavedModel load_newest(const std::string& folder, const Loading& loading,
                       const ParallelState& state) {
  const auto find = [&] { return find_checkpoint(folder); };
  for (;;) {
    SharedCheckpoint checkpoint(as_rank_0_finds(state, find, "checkpoint to load"), state);
    if (auto saved = read_model(checkpoint, loading, state)) return *std::move(saved);
  }
}

}  // namespace

SavedModel load_model(const std::string& folder, c10::Device device,
                      const std::optional<LogitsLimit>& limit) {
  return load_newest(folder, {nullptr, device, limit}, ParallelState::single_process());
}

SavedModel load_model(const std::string& folder, const ParallelConfig& parallel,
                      const ParallelState& state) {
  return load_newest(folder, {&parallel, state.device()}, state);
}

}  // namespace lockstep
