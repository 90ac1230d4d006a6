#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/models/gpt_model.h"

namespace lockstep {

struct GenerateOptions {
  int64_t max_tokens = 200;
  /// Divides the logits; 0 takes the most likely token.
  double temperature = 0.8;
  /// Samples among this many most likely tokens; 0: among all.
  int64_t top_k = 40;
  uint64_t seed = 1;
};

/// Continues `prompt` (token ids, at least one) and returns the new tokens. The model sees the last
/// seq_length tokens, without dropout. The same seed gives the same tokens. `on_token` (may be
/// empty) is called for each as it comes. ConfigError names an option that is out of its bounds.
/// UsageError: a logit is NaN.
std::vector<int64_t> generate(const GPTModel& model, std::vector<int64_t> prompt,
                              const GenerateOptions& options,
                              const std::function<void(int64_t)>& on_token = {});

}  // namespace lockstep
