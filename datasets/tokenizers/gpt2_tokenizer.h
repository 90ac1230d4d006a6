#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/datasets/byte_pairs.h"
#include "lockstep/datasets/gpt2_vocabulary.h"
#include "lockstep/datasets/tokenizer.h"

namespace lockstep {

/// GPT-2's byte-level byte-pair encoding, for any text; special tokens in a text are treated as
/// text. Equal to tiktoken's encode_ordinary for every text in UTF-8; bytes that are not UTF-8 are
/// preserved, too.
class Gpt2Tokenizer : public Tokenizer {
 public:
  explicit Gpt2Tokenizer(Gpt2Vocabulary vocabulary);
  /// Reads the vocabulary of a folder; errors as for read_gpt2_vocabulary().
  explicit Gpt2Tokenizer(const std::string& folder);

  int64_t vocabulary_size() const override;
  int64_t end_of_document() const override;
  size_t encode_front(std::string_view text, bool last, std::vector<int64_t>& ids) override;
  std::string decode(const std::vector<int64_t>& ids) const override;
  std::unique_ptr<Tokenizer> clone() const override;

 private:
  struct Tables;

  std::shared_ptr<const Tables> tables_;
  PieceEncoder encoder_;
};

}  // namespace lockstep
