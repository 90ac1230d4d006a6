#pragma once

#include <memory>
#include <string>

#include "lockstep/training/trainer.h"

namespace lockstep {

/// Whether a rank of a run with `config` holds the whole model: only the batch is split.
bool holds_whole_model(const Config& config);

/// The text that a run writes at its end: train.sample_prompt and what generate() adds to it, at
/// most train.sample_tokens, as `lockstep generate` would generate it from `checkpoint`. There is
/// never a second model in memory: if this rank holds the whole model in the arithmetic of
/// load_model() and without a capacity of experts, or if there is no checkpoint (empty), the text
/// comes from the trained model; otherwise `trainer` is destroyed before the model is loaded.
/// UsageError: no checkpoint, and this rank holds only a part of the model.
std::string sample_text(std::unique_ptr<Trainer> trainer, const std::string& checkpoint,
                        c10::Device device);

}  // namespace lockstep
