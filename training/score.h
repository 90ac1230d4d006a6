#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/models/gpt_model.h"
#include "lockstep/training/score_request.h"

namespace lockstep {

/// Logits in memory at a time, at most; score() always takes at least one sequence.
inline constexpr int64_t kMostLogits = int64_t{1} << 26;

struct Score {
  double logprob = 0;      ///< sum over the continuation's tokens, in nats
  bool is_greedy = false;  ///< whether each of them is the most likely token at its position
};

/// The scores of token sequences, in their order, without dropout. Sequences of similar length go
/// through the model together. If none of the tokens is scored, the sum is 0 and is_greedy is true.
/// UsageError: a logit is NaN.
std::vector<Score> score(const GPTModel& model, const std::vector<ScoreTokens>& requests);

}  // namespace lockstep
