#pragma once

#include <array>
#include <bitset>
#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace lockstep {

/// Cuts a text whose merges may join anything, as SentencePiece's, where they never do: between two
/// characters that stand side by side in no token that a merge makes. So a text need not be merged
/// as a whole, which takes longer than its parts, and which memory must hold; the ids are the same.
/// Threads may share it. Needs no libtorch.
class ApartCutter {
 public:
  /// The characters that have ids, by code point, and every token that a merge makes.
  ApartCutter(const std::unordered_map<uint32_t, uint32_t>& characters,
              const std::vector<std::string_view>& made_tokens);

  /// The length in bytes of the first part of `text`, which is UTF-8; 0 if that ends nowhere in it
  /// and more may come. Characters without ids stay together.
  size_t first(std::string_view text, bool last) const;

 private:
  bool together(uint32_t left, uint32_t right) const;
  bool side_by_side(uint32_t left, uint32_t right) const;

  std::bitset<size_t{128} * 128> ascii_;
  std::vector<uint64_t> pairs_;  ///< left * 2^32 + right, in an open hash table
  std::vector<bool> known_;      ///< by code point
};

}  // namespace lockstep
