#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/datasets/json_line.h"
#include "lockstep/datasets/tokenizer.h"

namespace lockstep {

/// The form of an input.
enum class InputForm {
  text,       ///< one document, any bytes
  json_lines  ///< one document per line
};

struct EncoderOptions {
  std::vector<std::string> keys = {"text"};  ///< of JSON lines; each has its own output
  bool append_eod = false;
  /// Largest number of tokens of a document in one output; by default that of an `.idx`.
  int64_t most_tokens = std::numeric_limits<int32_t>::max();
};

/// Receives the token ids of documents. A document has a sequence in each output; with JSON lines,
/// a document whose text has no token has none, as in Megatron's preprocess_data.py.
class DocumentSink {
 public:
  virtual ~DocumentSink() = default;

  virtual void append(size_t output, std::span<const int64_t> ids) = 0;
  /// Drops what the document has so far in this output.
  virtual void drop(size_t output) = 0;
  /// The document is complete in this output.
  virtual void end(size_t output, bool with_sequence) = 0;
};

/// Turns documents, which arrive piece by piece, into token ids. Keeps only one piece of the text
/// and what the tokenizer cannot decide yet. Needs no libtorch.
class DocumentEncoder : JsonLineParser::Strings {
 public:
  /// `tokenizer` and `sink` must outlive this object.
  DocumentEncoder(EncoderOptions options, Tokenizer& tokenizer, DocumentSink& sink);

  void begin_document(InputForm form);
  void feed(std::string_view piece);
  /// Returns what is wrong with the document, which is then dropped; nothing for a good document,
  /// or for a blank line, which is not a document.
  std::optional<std::string> end_document();
  /// What is already wrong with the text that was begun. Nothing more of it is then tokenized.
  std::optional<std::string> problem_so_far() const;
  /// Drops the document that was begun.
  void abandon_document();

  int64_t num_documents() const { return num_documents_; }
  int64_t num_tokens() const { return num_tokens_; }  ///< over all outputs

 private:
  void begin(size_t key) override;
  void append(std::string_view text) override;
  void end(size_t key) override;
  void encode(bool last);

  EncoderOptions options_;
  Tokenizer& tokenizer_;
  DocumentSink& sink_;
  JsonLineParser json_;
  InputForm form_ = InputForm::text;
  std::string text_;      ///< text that has no ids yet
  size_t encode_at_ = 0;  ///< number of bytes of text_ that is worth a call of the tokenizer
  std::vector<int64_t> ids_;
  size_t output_ = 0;            ///< the one that is being written
  std::vector<int64_t> tokens_;  ///< of the document, in each output
  int64_t num_documents_ = 0;
  int64_t num_tokens_ = 0;
};

}  // namespace lockstep
