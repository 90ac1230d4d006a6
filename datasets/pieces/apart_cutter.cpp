#include "lockstep/datasets/apart_cutter.h"

#include <bit>

#include "lockstep/datasets/utf8.h"

namespace lockstep {
namespace {

constexpr uint64_t kNoPair = ~uint64_t(0);

size_t place_of(uint64_t pair, size_t slots) {
  return static_cast<size_t>(pair * 0x9E3779B97F4A7C15u >> 32) & (slots - 1);
}

}  // namespace

ApartCutter::ApartCutter(const std::unordered_map<uint32_t, uint32_t>& characters,
                         const std::vector<std::string_view>& made_tokens, bool skip_unknown)
    : known_(kMalformed + 1), skip_unknown_(skip_unknown) {
  for (const auto& [point, id] : characters) known_[point] = true;
  size_t most = 0;
  for (const std::string_view token : made_tokens) most += token.size();
  pairs_.assign(std::bit_ceil(2 * most + 2), kNoPair);
  for (const std::string_view token : made_tokens) {
    Utf8Character left;
    for (size_t place = 0; place < token.size(); place += left.bytes) {
      const Utf8Character right = utf8_character(token, place);
      if (place > 0) {
        const uint64_t pair = uint64_t(left.point) << 32 | right.point;
        size_t slot = place_of(pair, pairs_.size());
        while (pairs_[slot] != kNoPair && pairs_[slot] != pair)
          slot = (slot + 1) & (pairs_.size() - 1);
        pairs_[slot] = pair;
        if (left.point < 128 && right.point < 128) ascii_.set(left.point * 128 + right.point);
      }
      left = right;
    }
  }
}

bool ApartCutter::side_by_side(uint32_t left, uint32_t right) const {
  if (left < 128 && right < 128) return ascii_[left * 128 + right];
  const uint64_t pair = uint64_t(left) << 32 | right;
  size_t slot = place_of(pair, pairs_.size());
  while (pairs_[slot] != kNoPair && pairs_[slot] != pair) slot = (slot + 1) & (pairs_.size() - 1);
  return pairs_[slot] == pair;
}

bool ApartCutter::together(uint32_t left, uint32_t right) const {
  return side_by_side(left, right) || (!known_[left] && !known_[right]);
}

size_t ApartCutter::first(std::string_view text, bool last) const {
  Utf8Character left = utf8_character(text, 0);
  size_t place = left.bytes;
  for (Utf8Character right; place < text.size(); place += right.bytes) {
    right = utf8_character(text, place);
    if (skip_unknown_ && !known_[right.point]) continue;
    if (!together(left.point, right.point)) return place;
    left = right;
  }
  return last ? place : 0;
}

}  // namespace lockstep
