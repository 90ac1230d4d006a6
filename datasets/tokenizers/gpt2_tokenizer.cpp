#include "lockstep/datasets/gpt2_tokenizer.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <utility>

#include "lockstep/core/check.h"
#include "lockstep/datasets/gpt2_pieces.h"

namespace lockstep {
namespace {

constexpr size_t kCacheSlots = 1 << 16;

uint64_t pair_of(uint32_t left, uint32_t right) { return uint64_t(left) << 32 | right; }

size_t spread(uint64_t key) { return static_cast<size_t>(key * 0x9E3779B97F4A7C15u >> 32); }

}  // namespace

Gpt2Tokenizer::Gpt2Tokenizer(Gpt2Vocabulary vocabulary)
    : vocabulary_(std::move(vocabulary)),
      merges_(std::bit_ceil(2 * vocabulary_.merges.size() + 2)),
      cache_(kCacheSlots) {
  for (const Gpt2Vocabulary::Merge& merge : vocabulary_.merges) {
    const uint64_t pair = pair_of(merge.left, merge.right);
    size_t slot = spread(pair) & (merges_.size() - 1);
    while (merges_[slot].rank != kNoRank) slot = (slot + 1) & (merges_.size() - 1);
    merges_[slot] = {pair, merge.rank, merge.result};
  }
  vocabulary_.merges = {};
}

Gpt2Tokenizer::Gpt2Tokenizer(const std::string& folder)
    : Gpt2Tokenizer(read_gpt2_vocabulary(folder)) {}

const Gpt2Tokenizer::Merge& Gpt2Tokenizer::find_merge(uint32_t left, uint32_t right) const {
  const uint64_t pair = pair_of(left, right);
  size_t slot = spread(pair) & (merges_.size() - 1);
  while (merges_[slot].rank != kNoRank && merges_[slot].pair != pair)
    slot = (slot + 1) & (merges_.size() - 1);
  return merges_[slot];
}

void Gpt2Tokenizer::merge_piece(std::string_view piece, std::vector<int64_t>& ids) {
  if (vocabulary_.keep_pieces) {
    const auto whole = vocabulary_.ids.find(piece);
    if (whole != vocabulary_.ids.end()) return ids.push_back(whole->second);
  }
  const auto size = static_cast<uint32_t>(piece.size());
  nodes_.resize(size);
  queue_.clear();
  const auto rank_at = [&](uint32_t place) {
    Node& node = nodes_[place];
    node.rank = node.next < size ? find_merge(node.id, nodes_[node.next].id).rank : kNoRank;
    if (node.rank == kNoRank) return;
    queue_.push_back(pair_of(node.rank, place));
    std::push_heap(queue_.begin(), queue_.end(), std::greater<>());
  };
  for (uint32_t i = 0; i < size; ++i)
    nodes_[i] = {vocabulary_.byte_ids[static_cast<unsigned char>(piece[i])], i - 1, i + 1, kNoRank};
  for (uint32_t i = 0; i < size; ++i) rank_at(i);
  while (!queue_.empty()) {
    std::pop_heap(queue_.begin(), queue_.end(), std::greater<>());
    const uint64_t first = queue_.back();
    queue_.pop_back();
    const auto place = static_cast<uint32_t>(first);
    Node& node = nodes_[place];
    if (node.rank != first >> 32) continue;  // one of the two was merged with another meanwhile
    Node& gone = nodes_[node.next];
    node.id = find_merge(node.id, gone.id).id;
    node.next = gone.next;
    gone.rank = kNoRank;
    if (node.next < size) nodes_[node.next].previous = place;
    rank_at(place);
    if (place > 0) rank_at(node.previous);
  }
  for (uint32_t place = 0; place < size; place = nodes_[place].next)
    ids.push_back(nodes_[place].id);
}

void Gpt2Tokenizer::encode_piece(std::string_view piece, std::vector<int64_t>& ids) {
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

size_t Gpt2Tokenizer::encode_front(std::string_view text, bool last, std::vector<int64_t>& ids) {
  size_t used = 0;
  while (used < text.size()) {
    const size_t length = gpt2_piece_length(text.substr(used));
    if (!last && used + length + kGpt2LookAhead > text.size()) break;
    encode_piece(text.substr(used, length), ids);
    used += length;
  }
  return used;
}

std::string Gpt2Tokenizer::decode(const std::vector<int64_t>& ids) const {
  std::string text;
  for (const int64_t id : ids) {
    require<UsageError>(id >= 0 && id < vocabulary_size(),
                        "Gpt2Tokenizer: token id: found {}, allowed: 0 to {}", id,
                        vocabulary_size() - 1);
    text += vocabulary_.tokens[static_cast<size_t>(id)];
  }
  return text;
}

int64_t Gpt2Tokenizer::end_of_document() const {
  require<FileError>(vocabulary_.end_of_text.has_value(),
                     "'{}': found no token '<|endoftext|>', which ends documents",
                     vocabulary_.path);
  return *vocabulary_.end_of_text;
}

}  // namespace lockstep
