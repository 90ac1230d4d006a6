#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/datasets/tokenizer.h"

namespace lockstep {

struct SentencepieceFunctions;

/// SentencePiece, by its own library, with the model of a file. The library is in
/// liblockstep_sentencepiece.so, which is built where CMake finds it and loaded when it is needed,
/// with symbols of its own: it brings along another protobuf.
///
/// A text is encoded as a whole: nothing of it can be given before its end is there, so that a
/// document of `lockstep data build` must fit into the memory. Line ends and runs of spaces are
/// what the model makes of them, so decode() need not give the text back.
class SentencepieceTokenizer : public Tokenizer {
 public:
  /// ConfigError, with `field`, where this build has no SentencePiece; FileError for a file that is
  /// missing or no model.
  SentencepieceTokenizer(const std::string& path, const std::string& field);

  int64_t vocabulary_size() const override;
  /// The model's end of a sentence.
  int64_t end_of_document() const override;
  size_t encode_front(std::string_view text, bool last, std::vector<int64_t>& ids) override;
  std::string decode(const std::vector<int64_t>& ids) const override;
  std::unique_ptr<Tokenizer> clone() const override;

 private:
  std::string path_;
  const SentencepieceFunctions& functions_;
  std::shared_ptr<void> model_;  ///< several threads may read it
};

/// Whether SentencepieceTokenizer can be used.
bool has_sentencepiece();

}  // namespace lockstep
