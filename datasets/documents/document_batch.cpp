#include "lockstep/datasets/document_batch.h"

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

/// Packs the ids of documents one after another.
class BatchSink : public DocumentSink {
 public:
  BatchSink(std::vector<EncodedBatch::Output>& outputs, TokenType type)
      : outputs_(outputs), type_(type), begins_(outputs.size()) {}

  void append(size_t output, std::span<const int64_t> ids) override {
    pack_tokens(ids, type_, outputs_[output].packed);
  }

  void drop(size_t output) override { outputs_[output].packed.resize(begins_[output]); }

  void end(size_t output, bool with_sequence) override {
    auto& [packed, lengths] = outputs_[output];
    const auto bytes = static_cast<int64_t>(packed.size() - begins_[output]);
    lengths.push_back(with_sequence ? bytes / token_type_bytes(type_) : EncodedBatch::kNoSequence);
    begins_[output] = packed.size();
  }

 private:
  std::vector<EncodedBatch::Output>& outputs_;
  TokenType type_;
  std::vector<size_t> begins_;  ///< where the next document begins in packed
};

}  // namespace

std::string BadDocument::message() const {
  return line > 0 ? fmt::format("'{}': line {}: {}", path, line, problem)
                  : fmt::format("'{}': {}", path, problem);
}

EncodedBatch encode_batch(const DocumentBatch& batch, const BatchOptions& options,
                          Tokenizer& tokenizer) {
  EncodedBatch encoded;
  encoded.outputs.resize(options.encoder.keys.size());
  BatchSink sink(encoded.outputs, options.type);
  DocumentEncoder encoder(options.encoder, tokenizer, sink);
  for (const DocumentBatch::Document& document : batch.documents) {
    encoder.begin_document(document.form);
    encoder.feed(std::string_view(batch.bytes).substr(document.begin, document.size));
    const std::optional<std::string> problem = encoder.end_document();
    if (!problem) continue;
    encoded.bad.push_back({options.inputs[document.input], document.line, *problem});
    if (!options.skip_bad) break;
  }
  encoded.documents = encoder.num_documents();
  encoded.tokens = encoder.num_tokens();
  return encoded;
}

}  // namespace lockstep
