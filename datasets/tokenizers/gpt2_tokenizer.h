#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/datasets/gpt2_vocabulary.h"
#include "lockstep/datasets/tokenizer.h"

namespace lockstep {

/// GPT-2's byte-level byte-pair encoding, of any text; special tokens in a text are text. Equal to
/// tiktoken's encode_ordinary for every text in UTF-8; bytes that are none survive too.
class Gpt2Tokenizer : public Tokenizer {
 public:
  explicit Gpt2Tokenizer(Gpt2Vocabulary vocabulary);
  /// With the vocabulary of a folder; errors as of read_gpt2_vocabulary().
  explicit Gpt2Tokenizer(const std::string& folder);

  int64_t vocabulary_size() const override {
    return static_cast<int64_t>(vocabulary_.tokens.size());
  }
  int64_t end_of_document() const override;
  size_t encode_front(std::string_view text, bool last, std::vector<int64_t>& ids) override;
  std::string decode(const std::vector<int64_t>& ids) const override;

 private:
  static constexpr uint32_t kNoRank = 0xFFFFFFFF;

  /// What two neighbours become; in an open hash table.
  struct Merge {
    uint64_t pair = ~uint64_t(0);  ///< left id * 2^32 + right id
    uint32_t rank = kNoRank;       ///< the lowest first
    uint32_t id = 0;
  };
  /// The ids of a short piece that was met before.
  struct CachedPiece {
    std::array<uint64_t, 2> bytes = {};
    uint8_t length = 0;
    uint8_t count = 0;
    std::array<uint32_t, 3> ids = {};
  };
  /// A token of the piece that is being merged.
  struct Node {
    uint32_t id, previous, next;
    uint32_t rank;  ///< of the merge with the next one
  };

  const Merge& find_merge(uint32_t left, uint32_t right) const;
  void encode_piece(std::string_view piece, std::vector<int64_t>& ids);
  void merge_piece(std::string_view piece, std::vector<int64_t>& ids);

  Gpt2Vocabulary vocabulary_;
  std::vector<Merge> merges_;
  std::vector<CachedPiece> cache_;
  std::vector<Node> nodes_;
  std::vector<uint64_t> queue_;  ///< rank * 2^32 + place; a heap, the lowest in front
};

}  // namespace lockstep
