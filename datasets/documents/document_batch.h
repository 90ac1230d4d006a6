#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/datasets/document_encoder.h"
#include "lockstep/datasets/token_type.h"

namespace lockstep {

/// A document, or a line, that cannot be used.
struct BadDocument {
  std::string path;
  int64_t line = 0;  ///< 0: in a text
  std::string problem;

  /// "'corpus.jsonl': line 3: byte 10: found ..."
  std::string message() const;
};

/// Whole documents from any inputs, processed by one worker at a time.
struct DocumentBatch {
  struct Document {
    size_t begin = 0;  ///< in `bytes`
    size_t size = 0;
    InputForm form = InputForm::text;
    size_t input = 0;
    int64_t line = 0;
  };

  std::string bytes;
  std::vector<Document> documents;
};

/// The result of a batch.
struct EncodedBatch {
  static constexpr int64_t kNoSequence = -1;

  struct Output {
    std::string packed;            ///< the ids of all documents
    std::vector<int64_t> lengths;  ///< of each good document, number of ids, or kNoSequence
  };

  std::vector<Output> outputs;
  std::vector<BadDocument> bad;
  int64_t documents = 0;
  int64_t tokens = 0;
};

struct BatchOptions {
  EncoderOptions encoder;
  TokenType type = TokenType::uint16;
  bool skip_bad = false;            ///< otherwise processing ends at the first bad document
  std::vector<std::string> inputs;  ///< their paths
};

EncodedBatch encode_batch(const DocumentBatch& batch, const BatchOptions& options,
                          Tokenizer& tokenizer);

}  // namespace lockstep
