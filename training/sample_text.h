#pragma once

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "lockstep/datasets/tokenizer.h"
#include "lockstep/training/trainer.h"

namespace lockstep {

/// Whether a rank of a run with `config` holds the whole model: only the batch is split.
bool holds_whole_model(const Config& config);

/// The text that a run writes at its end: train.sample_prompt and what generate() adds to it, at
/// most train.sample_tokens, as `lockstep generate` would generate it from the checkpoint.
class SampleText {
 public:
  /// Reads all that the text needs besides the model, so that a run knows before its first
  /// iteration whether it can write it. ConfigError names train.sample_prompt if it has no token or
  /// an id outside the model's vocabulary; errors also as for make_tokenizer() and ends_of_text().
  explicit SampleText(const Config& config);

  /// `checkpoint`: what the run saved last; empty if it saves nowhere. There is never a second
  /// model in memory: if this rank holds the whole model in the arithmetic of load_model() and
  /// without a capacity of experts, or if there is no checkpoint, the text comes from the trained
  /// model; otherwise `trainer` is destroyed before the model is loaded from `checkpoint`.
  /// UsageError: no checkpoint, and this rank holds only a part of the model.
  std::string write(std::unique_ptr<Trainer> trainer, const std::string& checkpoint,
                    c10::Device device) const;

 private:
  std::string continued_by(const GPTModel& model) const;

  TrainConfig config_;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::vector<int64_t> prompt_;
  std::set<int64_t> ends_;
};

}  // namespace lockstep
