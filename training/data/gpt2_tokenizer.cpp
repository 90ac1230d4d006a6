#include "lockstep/training/data/gpt2_tokenizer.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>

#include "lockstep/core/check.h"
#include "lockstep/training/data/gpt2_pieces.h"
#include "lockstep/training/data/mapped_file.h"

namespace lockstep {
namespace {

using Json = nlohmann::json;

constexpr size_t kCacheSlots = 1 << 16;
constexpr std::string_view kEndOfText = "<|endoftext|>";

uint64_t pair_of(uint32_t left, uint32_t right) { return uint64_t(left) << 32 | right; }

size_t spread(uint64_t key) { return static_cast<size_t>(key * 0x9E3779B97F4A7C15u >> 32); }

/// GPT-2 writes bytes as characters: those that Latin-1 prints as themselves, the others, in order,
/// from U+0100 on. Entry c is the byte of code point c, or -1.
std::array<int16_t, 324> make_alphabet() {
  std::array<int16_t, 324> bytes;
  bytes.fill(-1);
  size_t next = 256;
  for (int16_t byte = 0; byte < 256; ++byte) {
    const bool printed = (byte > 0x20 && byte < 0x7F) || (byte > 0xA0 && byte != 0xAD);
    bytes[printed ? static_cast<size_t>(byte) : next++] = byte;
  }
  return bytes;
}

/// The bytes of a name in that alphabet, all of whose code points have one or two bytes in UTF-8.
std::string bytes_of_name(std::string_view name, const std::string& place) {
  static const std::array<int16_t, 324> alphabet = make_alphabet();
  std::string bytes;
  for (size_t i = 0; i < name.size(); ++i) {
    size_t point = static_cast<unsigned char>(name[i]);
    if (point >= 0x80) {
      const auto next = i + 1 < name.size() ? static_cast<unsigned char>(name[++i]) : 0;
      const bool good = point >= 0xC2 && point < 0xE0 && (next & 0xC0) == 0x80;
      point = good ? (point & 0x1F) << 6 | (next & 0x3F) : alphabet.size();
    }
    const int16_t byte = point < alphabet.size() ? alphabet[point] : int16_t(-1);
    require<FileError>(byte >= 0, "{}: found '{}', allowed: characters of GPT-2's alphabet", place,
                       name);
    bytes.push_back(static_cast<char>(byte));
  }
  require<FileError>(!bytes.empty(), "{}: found an empty token", place);
  return bytes;
}

}  // namespace

Gpt2Tokenizer::Gpt2Tokenizer(const std::string& folder)
    : Gpt2Tokenizer(MappedFile(folder + "/encoder.json").bytes(), folder + "/encoder.json",
                    MappedFile(folder + "/vocab.bpe").bytes(), folder + "/vocab.bpe") {}

Gpt2Tokenizer::Gpt2Tokenizer(std::string_view encoder, const std::string& encoder_path,
                             std::string_view merges, const std::string& merges_path)
    : path_(encoder_path), cache_(kCacheSlots) {
  read_encoder(encoder, encoder_path);
  read_merges(merges, merges_path);
}

void Gpt2Tokenizer::read_encoder(std::string_view text, const std::string& path) {
  Json json;
  try {
    json = Json::parse(text);
  } catch (const Json::exception& error) {
    fail<FileError>("'{}' is damaged: {}", path, error.what());
  }
  require<FileError>(json.is_object(), "'{}': found no JSON object of tokens and ids", path);
  tokens_.resize(json.size());
  for (const auto& [name, value] : json.items()) {
    const std::string place = fmt::format("'{}': token '{}'", path, name);
    const bool good = value.is_number_unsigned() && value.get<uint64_t>() < tokens_.size();
    require<FileError>(good, "{}: id: found {}, allowed: 0 to {}", place, value.dump(),
                       tokens_.size() - 1);
    const auto id = value.get<uint32_t>();
    require<FileError>(tokens_[id].empty(), "{}: id: found {}, which another token has", place, id);
    tokens_[id] = bytes_of_name(name, place);
    ids_[tokens_[id]] = id;
  }
  for (size_t byte = 0; byte < byte_ids_.size(); ++byte) {
    const auto found = ids_.find(std::string(1, static_cast<char>(byte)));
    require<FileError>(found != ids_.end(), "'{}': found no token for byte {}, allowed: all 256",
                       path, byte);
    byte_ids_[byte] = found->second;
  }
}

void Gpt2Tokenizer::read_merges(std::string_view text, const std::string& path) {
  const auto lines = static_cast<size_t>(std::count(text.begin(), text.end(), '\n')) + 1;
  merges_.resize(std::bit_ceil(2 * lines));
  uint32_t rank = 0;
  for (size_t number = 1; !text.empty(); ++number) {
    std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.empty() || (number == 1 && line.starts_with("#version"))) continue;
    add_merge(line, rank++, fmt::format("'{}': line {}", path, number));
  }
}

void Gpt2Tokenizer::add_merge(std::string_view line, uint32_t rank, const std::string& place) {
  const size_t space = line.find(' ');
  require<FileError>(space != line.npos && line.find(' ', space + 1) == line.npos,
                     "{}: found '{}', allowed: two tokens with a space between", place, line);
  const auto id_of = [&](const std::string& bytes) {
    const auto found = ids_.find(bytes);
    require<FileError>(found != ids_.end(), "{}: found '{}', allowed: tokens of '{}'", place, line,
                       path_);
    return found->second;
  };
  const std::string left = bytes_of_name(line.substr(0, space), place);
  const std::string right = bytes_of_name(line.substr(space + 1), place);
  const uint64_t pair = pair_of(id_of(left), id_of(right));
  size_t slot = spread(pair) & (merges_.size() - 1);
  for (; merges_[slot].rank != kNoRank; slot = (slot + 1) & (merges_.size() - 1))
    require<FileError>(merges_[slot].pair != pair, "{}: found '{}' for the second time", place,
                       line);
  merges_[slot] = {pair, rank, id_of(left + right)};
}

const Gpt2Tokenizer::Merge& Gpt2Tokenizer::find_merge(uint32_t left, uint32_t right) const {
  const uint64_t pair = pair_of(left, right);
  size_t slot = spread(pair) & (merges_.size() - 1);
  while (merges_[slot].rank != kNoRank && merges_[slot].pair != pair)
    slot = (slot + 1) & (merges_.size() - 1);
  return merges_[slot];
}

void Gpt2Tokenizer::merge_piece(std::string_view piece) {
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
    nodes_[i] = {byte_ids_[static_cast<unsigned char>(piece[i])], i - 1, i + 1, kNoRank};
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
  merge_piece(piece);
  for (uint32_t place = 0; place < piece.size(); place = nodes_[place].next)
    ids.push_back(nodes_[place].id);
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
    text += tokens_[static_cast<size_t>(id)];
  }
  return text;
}

int64_t Gpt2Tokenizer::end_of_document() const {
  const auto found = ids_.find(kEndOfText);
  require<FileError>(found != ids_.end(), "'{}': found no token '{}', which ends documents", path_,
                     kEndOfText);
  return found->second;
}

}  // namespace lockstep
