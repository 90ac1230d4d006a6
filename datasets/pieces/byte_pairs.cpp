#include "lockstep/datasets/byte_pairs.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <utility>

#include "lockstep/datasets/utf8.h"

namespace lockstep {
namespace {

constexpr size_t kCacheSlots = 1 << 16;
constexpr uint32_t kNoRank = MergeTable::kNoRank;

uint64_t pair_of(uint32_t left, uint32_t right) { return uint64_t(left) << 32 | right; }

size_t spread(uint64_t key) { return static_cast<size_t>(key * 0x9E3779B97F4A7C15u >> 32); }

}  // namespace

MergeTable::MergeTable(const std::vector<PairMerge>& merges)
    : slots_(std::bit_ceil(2 * merges.size() + 2)) {
  for (const PairMerge& merge : merges) {
    const uint64_t pair = pair_of(merge.left, merge.right);
    size_t slot = spread(pair) & (slots_.size() - 1);
    while (slots_[slot].rank != kNoRank && slots_[slot].pair != pair)
      slot = (slot + 1) & (slots_.size() - 1);
    slots_[slot] = {pair, merge.rank, merge.result};
  }
}

const MergeTable::Merge& MergeTable::find(uint32_t left, uint32_t right) const {
  const uint64_t pair = pair_of(left, right);
  size_t slot = spread(pair) & (slots_.size() - 1);
  while (slots_[slot].rank != kNoRank && slots_[slot].pair != pair)
    slot = (slot + 1) & (slots_.size() - 1);
  return slots_[slot];
}

PieceEncoder::PieceEncoder(std::shared_ptr<const PieceVocabulary> vocabulary)
    : vocabulary_(std::move(vocabulary)), cache_(kCacheSlots) {}

void PieceEncoder::begin_characters(std::string_view piece) {
  const PieceAlphabet& alphabet = vocabulary_->alphabet;
  bool after_unknown = false;
  for (size_t place = 0; place < piece.size();) {
    const Utf8Character next = utf8_character(piece, place);
    const auto found = alphabet.characters.find(next.point);
    const bool known = found != alphabet.characters.end();
    if (known) {
      nodes_.push_back({found->second, 0, 0, kNoRank});
    } else if (alphabet.has_bytes) {
      for (const char byte : piece.substr(place, next.bytes))
        nodes_.push_back({alphabet.bytes[static_cast<unsigned char>(byte)], 0, 0, kNoRank});
    } else if (alphabet.unknown && !(after_unknown && alphabet.join_unknown)) {
      nodes_.push_back({*alphabet.unknown, 0, 0, kNoRank});
    }
    after_unknown = !known;
    place += next.bytes;
  }
}

void PieceEncoder::begin_bytes(std::string_view piece) {
  const PieceAlphabet& alphabet = vocabulary_->alphabet;
  bool after_unknown = false;
  for (const char byte : piece) {
    uint32_t id = alphabet.bytes[static_cast<unsigned char>(byte)];
    const bool known = id != PieceAlphabet::kNoId;
    if (!known && alphabet.unknown && !(after_unknown && alphabet.join_unknown))
      id = *alphabet.unknown;
    if (id != PieceAlphabet::kNoId) nodes_.push_back({id, 0, 0, kNoRank});
    after_unknown = !known;
  }
}

void PieceEncoder::begin_piece(std::string_view piece) {
  nodes_.clear();
  if (vocabulary_->alphabet.by_bytes) {
    begin_bytes(piece);
  } else {
    begin_characters(piece);
  }
  for (uint32_t i = 0; i < nodes_.size(); ++i) {
    nodes_[i].previous = i - 1;
    nodes_[i].next = i + 1;
  }
}

void PieceEncoder::merge_piece(std::string_view piece, std::vector<int64_t>& ids) {
  const auto whole = vocabulary_->whole_pieces.find(piece);
  if (whole != vocabulary_->whole_pieces.end()) return ids.push_back(whole->second);
  begin_piece(piece);
  const MergeTable& merges = vocabulary_->merges;
  const auto size = static_cast<uint32_t>(nodes_.size());
  queue_.clear();
  const auto rank_at = [&](uint32_t place) {
    Node& node = nodes_[place];
    node.rank = node.next < size ? merges.find(node.id, nodes_[node.next].id).rank : kNoRank;
    if (node.rank == kNoRank) return;
    queue_.push_back(pair_of(node.rank, place));
    std::push_heap(queue_.begin(), queue_.end(), std::greater<>());
  };
  for (uint32_t i = 0; i < size; ++i) rank_at(i);
  while (!queue_.empty()) {
    std::pop_heap(queue_.begin(), queue_.end(), std::greater<>());
    const uint64_t first = queue_.back();
    queue_.pop_back();
    const auto place = static_cast<uint32_t>(first);
    Node& node = nodes_[place];
    if (node.rank != first >> 32) continue;  // one of the two was merged with another meanwhile
    Node& gone = nodes_[node.next];
    node.id = merges.find(node.id, gone.id).result;
    node.next = gone.next;
    gone.rank = kNoRank;
    if (node.next < size) nodes_[node.next].previous = place;
    rank_at(place);
    if (place > 0) rank_at(node.previous);
  }
  for (uint32_t place = 0; place < size; place = nodes_[place].next)
    ids.push_back(nodes_[place].id);
}

void PieceEncoder::encode(std::string_view piece, std::vector<int64_t>& ids) {
  CachedPiece key;
  const bool fits = piece.size() <= sizeof key.bytes;
  if (fits) std::memcpy(key.bytes.data(), piece.data(), piece.size());
  CachedPiece& cached =
      cache_[(spread(key.bytes[0]) ^ spread(key.bytes[1] + piece.size())) & (kCacheSlots - 1)];
  if (fits && cached.length == piece.size() && cached.bytes == key.bytes) {
    for (size_t i = 0; i < cached.count; ++i) ids.push_back(cached.ids[i]);
    return;
  }
  const size_t before = ids.size();
  merge_piece(piece, ids);
  const size_t count = ids.size() - before;
  if (!fits || count > key.ids.size()) return;
  key.length = static_cast<uint8_t>(piece.size());
  key.count = static_cast<uint8_t>(count);
  for (size_t i = 0; i < count; ++i) key.ids[i] = static_cast<uint32_t>(ids[before + i]);
  cached = key;
}

}  // namespace lockstep
