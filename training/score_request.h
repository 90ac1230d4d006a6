#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/datasets/tokenizer.h"

/// The requests of `lockstep score`: how likely a text is after another, according to a model.
/// Needs no libtorch.
namespace lockstep {

/// A line of JSONL.
struct ScoreRequest {
  std::string line;  ///< as it is in the file
  std::string context;
  std::string continuation;
  int64_t line_number = 0;  ///< from 1 on
};

/// One object per line with the texts `context` and `continuation`; other keys are allowed, and
/// blank lines are skipped. FileError with `path` and the line: not a JSON object in UTF-8, or a
/// key that is missing or not a text.
std::vector<ScoreRequest> parse_score_requests(std::string_view text, const std::string& path);

/// The line with `logprob` and `is_greedy` added.
std::string format_score(const ScoreRequest& request, double logprob, bool is_greedy);

/// Token ids that a model reads; the last `scored` of them are the continuation's.
struct ScoreTokens {
  std::vector<int64_t> ids;
  int64_t scored = 0;
};

/// Divides them as lm-evaluation-harness does: spaces at the end of the context belong to the
/// continuation, both are encoded together, and the context gets as many tokens as it has alone. An
/// empty context is Tokenizer::begin_of_text(). Of more than `seq_length` + 1 ids the last ones
/// stay, and the first of these is not scored. An empty continuation has no token. ConfigError: a
/// continuation that is not empty has no token of its own; an id is not below `vocab_size`.
ScoreTokens encode_score_request(const ScoreRequest& request, Tokenizer& tokenizer,
                                 int64_t seq_length, int64_t vocab_size);

}  // namespace lockstep
