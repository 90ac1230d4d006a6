#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lockstep/models/gpt_model.h"

namespace lockstep {

struct GenerateOptions {
  int64_t max_tokens = 200;
  /// Divides the logits; 0 takes the most likely token.
  double temperature = 0.8;
  /// Samples from this many of the most likely tokens; 0: from all.
  int64_t top_k = 40;
  uint64_t seed = 1;
  /// Of these, samples from the smallest set of most likely tokens whose probabilities reach this
  /// sum; 1: all.
  double top_p = 1;
  /// Of the ids that are this large or larger only `ends` are drawn; unset: all ids of the model
  /// can be. A model's vocabulary can be larger than that of its tokenizer.
  std::optional<int64_t> vocabulary_size = {};
  /// Keeps keys and values, so that each token is read once; false: reads all tokens again for each
  /// new one.
  bool use_cache = true;
  /// Ids before which a text ends: they are not among its new tokens, and `on_token` does not get
  /// them.
  std::set<int64_t> ends = {};
};

/// What is wrong with a prompt: it has no token, or an id outside the vocabulary. `where` follows
/// what was found, as in " in 'text'". Empty if nothing is wrong.
std::string problem_of_prompt(const std::vector<int64_t>& tokens, int64_t vocab_size,
                              const std::string& where = "");

/// Called with each new token of prompt `prompt`. Returns whether that prompt is to be continued.
using TokenListener = std::function<bool(size_t prompt, int64_t token)>;

/// Continues `prompts` (token ids, at least one each) together and returns the new tokens of each.
/// The model sees the last seq_length tokens, without dropout. A prompt gets the same tokens as if
/// it were alone, unless experts have a capacity, which load_model() takes off: the same seed gives
/// the same tokens. `on_token` may be empty. Sequences longer than seq_length are read again for
/// each token, because the positions in the window change with each. If the model is cut over the
/// ranks of `state`, as load_model() makes it, all of them must call this with the same arguments,
/// and all get the same tokens. ConfigError names an option that is out of bounds, and an id of a
/// prompt outside the model's vocabulary. UsageError: a logit is NaN.
std::vector<std::vector<int64_t>> generate_batch(
    const GPTModel& model, const std::vector<std::vector<int64_t>>& prompts,
    const GenerateOptions& options, const TokenListener& on_token = {},
    const ParallelState& state = ParallelState::single_process());

/// The same for one prompt.
std::vector<int64_t> generate(const GPTModel& model, const std::vector<int64_t>& prompt,
                              const GenerateOptions& options,
                              const std::function<void(int64_t)>& on_token = {});

}  // namespace lockstep
