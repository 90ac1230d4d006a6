#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/datasets/tokenizer.h"

/// What `lockstep score` is asked for: how likely a model finds a text after another. Needs no
/// libtorch.
namespace lockstep {

/// A line of JSONL.
struct ScoreRequest {
  std::string line;  ///< as it stands in the file
  std::string context;
  std::string continuation;
  int64_t line_number = 0;  ///< from 1 on
};

/// One object a line with the texts `context` and `continuation`; other keys are allowed, and blank
/// lines are passed over. FileError with `path` and the line: no JSON object in UTF-8, a key that
/// is missing or no text.
std::vector<ScoreRequest> parse_score_requests(std::string_view text, const std::string& path);

/// The line with `logprob` and `is_greedy` added.
std::string format_score(const ScoreRequest& request, double logprob, bool is_greedy);

/// Token ids that a model reads, of which the last `scored` are the continuation's.
struct ScoreTokens {
  std::vector<int64_t> ids;
  int64_t scored = 0;
};

/// As lm-evaluation-harness divides them: spaces at the end of the context belong to the
/// continuation, both are encoded together, and the context's tokens are as many as it has alone.
/// An empty context is the end of a document. Of more than `seq_length` + 1 ids the last stay, of
/// which the first is not scored. An empty continuation has no token. ConfigError: another one has
/// none of its own; an id is not below `vocab_size`.
ScoreTokens encode_score_request(const ScoreRequest& request, Tokenizer& tokenizer,
                                 int64_t seq_length, int64_t vocab_size);

}  // namespace lockstep
