#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/datasets/tokenizer.h"

namespace lockstep {

struct SentencepieceFunctions;

/// SentencePiece, using its own library, with the model in a file. The library is in
/// liblockstep_sentencepiece.so, which is built if CMake finds SentencePiece, and loaded on demand,
/// with its own symbols, because it includes a different protobuf.
///
/// A text is encoded as a whole: no ids can be returned before its end has arrived, so a document
/// of `lockstep data build` must fit into memory. The model determines what happens to line ends
/// and runs of spaces, so decode() need not return the original text.
class SentencepieceTokenizer : public Tokenizer {
 public:
  /// ConfigError, with `field`, if this build has no SentencePiece; FileError for a file that is
  /// missing or not a model.
  SentencepieceTokenizer(const std::string& path, const std::string& field);

  int64_t vocabulary_size() const override;
  /// The model's end of a sentence.
  int64_t end_of_document() const override;
  /// The model's beginning of a sentence; if it has none, the end.
  int64_t begin_of_text() const override;
  size_t encode_front(std::string_view text, bool last, std::vector<int64_t>& ids) override;
  std::string decode(const std::vector<int64_t>& ids) const override;
  /// Piece by piece, without the model's denormalizer, which few have.
  std::string decode_more(const std::vector<int64_t>& ids) const override;
  std::unique_ptr<Tokenizer> clone() const override;

 private:
  /// UsageError names an id that does not exist.
  void check_ids(const std::vector<int64_t>& ids) const;

  std::string path_;
  const SentencepieceFunctions& functions_;
  std::shared_ptr<void> model_;  ///< several threads may read it
};

/// Whether SentencepieceTokenizer can be used.
bool has_sentencepiece();

}  // namespace lockstep
