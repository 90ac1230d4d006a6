#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

/// Byte-pair encoding of the pieces of a text. Needs no libtorch.
namespace lockstep {

/// The result of merging two neighbouring tokens.
struct PairMerge {
  uint32_t left = 0;
  uint32_t right = 0;
  uint32_t result = 0;
  uint32_t rank = 0;  ///< the lowest first
};

/// The merges by their pairs, in an open hash table. Of two merges of the same pair the last
/// counts.
class MergeTable {
 public:
  static constexpr uint32_t kNoRank = 0xFFFFFFFF;
  struct Merge {
    uint64_t pair = ~uint64_t(0);  ///< left * 2^32 + right
    uint32_t rank = kNoRank;
    uint32_t result = 0;
  };

  explicit MergeTable(const std::vector<PairMerge>& merges);

  /// Has kNoRank if the two are not merged.
  const Merge& find(uint32_t left, uint32_t right) const;

 private:
  std::vector<Merge> slots_;
};

/// The ids of bytes or characters before any merge.
struct PieceAlphabet {
  /// A piece starts out as its bytes; otherwise as its characters.
  bool by_bytes = true;
  static constexpr uint32_t kNoId = 0xFFFFFFFF;  ///< of a byte that has none
  /// Ids of the bytes. If a piece starts out as characters, they are used, if `has_bytes`, for the
  /// bytes of a character that has no id.
  std::array<uint32_t, 256> bytes = {};
  bool has_bytes = true;
  std::unordered_map<uint32_t, uint32_t> characters;  ///< ids by code point
  /// Of any other character or byte; if unset, that is left out, and merges join its neighbors.
  std::optional<uint32_t> unknown;
  bool join_unknown = false;  ///< one id for several such characters or bytes in a row
};

/// A hash that allows looking up strings by views.
struct StringHash {
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
};
using IdsByBytes = std::unordered_map<std::string, uint32_t, StringHash, std::equal_to<>>;

/// The data that the encoders of several threads share.
struct PieceVocabulary {
  PieceAlphabet alphabet;
  MergeTable merges{std::vector<PairMerge>()};
  /// A piece that is one of these stays whole, whatever the merges would make of it.
  IdsByBytes whole_pieces;
};

/// Pieces to ids, on one thread.
class PieceEncoder {
 public:
  explicit PieceEncoder(std::shared_ptr<const PieceVocabulary> vocabulary);

  const std::shared_ptr<const PieceVocabulary>& vocabulary() const { return vocabulary_; }

  /// Appends the ids of a piece.
  void encode(std::string_view piece, std::vector<int64_t>& ids);

 private:
  /// The ids of a short piece that was encoded before.
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

  void begin_bytes(std::string_view piece);
  void begin_piece(std::string_view piece);
  void begin_characters(std::string_view piece);
  void merge_piece(std::string_view piece, std::vector<int64_t>& ids);

  std::shared_ptr<const PieceVocabulary> vocabulary_;
  std::vector<CachedPiece> cache_;
  std::vector<Node> nodes_;
  std::vector<uint64_t> queue_;  ///< rank * 2^32 + place; a heap with the lowest in front
};

}  // namespace lockstep
