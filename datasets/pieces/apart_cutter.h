#pragma once

#include <array>
#include <bitset>
#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace lockstep {

/// For encodings whose merges may join anything, like SentencePiece's: cuts a text where merges
/// never join it, between two characters that are adjacent in no token that a merge makes. So a
/// text need not be merged as a whole, which takes longer than merging its parts and must fit in
/// memory; the ids are the same. Threads may share it. Needs no libtorch.
class ApartCutter {
 public:
  /// `characters`: those that have ids, by code point. `made_tokens`: every token that a merge
  /// makes. `skip_unknown`: characters without ids vanish before the merges, which then join what
  /// is on both sides of them.
  ApartCutter(const std::unordered_map<uint32_t, uint32_t>& characters,
              const std::vector<std::string_view>& made_tokens, bool skip_unknown = false);

  /// The length in bytes of the first part of `text`, which is UTF-8; 0 if the part does not end in
  /// it and more may follow. Characters without ids stay together.
  size_t first(std::string_view text, bool last) const;

 private:
  bool together(uint32_t left, uint32_t right) const;
  bool side_by_side(uint32_t left, uint32_t right) const;

  std::bitset<size_t{128} * 128> ascii_;
  std::vector<uint64_t> pairs_;  ///< left * 2^32 + right, in an open hash table
  std::vector<bool> known_;      ///< by code point
  bool skip_unknown_;
};

}  // namespace lockstep
