#include "lockstep/datasets/hugging_face_model.h"

#include <set>
#include <utility>

#include "lockstep/datasets/byte_alphabet.h"
#include "lockstep/datasets/utf8.h"

namespace lockstep {
namespace {

constexpr size_t kLongestAdded = 1024;

TokenNames read_vocabulary(const JsonField& vocab) {
  TokenNames tokens;
  const auto& object = vocab.object();
  const auto most = static_cast<uint32_t>(2 * object.size() + 1024);
  tokens.ids.reserve(object.size());
  for (const auto& [name, value] : object) {
    const auto refuse = [&, &name = name](const std::string& what) {
      fail<FileError>("{}: token '{}': {}", vocab.place(), name, what);
    };
    if (!value.is_number_unsigned() || value.get<uint64_t>() > most)
      refuse(fmt::format("id: found {}, allowed: 0 to {}", value.dump(), most));
    const auto id = value.get<uint32_t>();
    if (id >= tokens.names.size()) tokens.names.resize(id + 1);
    if (name.empty()) refuse("found an empty token");
    if (!tokens.names[id].empty())
      refuse(fmt::format("id: found {}, which '{}' has", id, tokens.names[id]));
    tokens.names[id] = name;
    tokens.ids.emplace(name, id);
  }
  return tokens;
}

/// The two tokens of a merge, written "a b" or ["a", "b"].
std::pair<std::string, std::string> sides_of(const JsonField& merge) {
  if (merge.json().is_array() && merge.size() == 2) return {merge.at(0).text(), merge.at(1).text()};
  if (merge.json().is_string()) {
    const auto& text = merge.json().get_ref<const std::string&>();
    const size_t space = text.find(' ');
    if (space != text.npos && text.find(' ', space + 1) == text.npos)
      return {text.substr(0, space), text.substr(space + 1)};
  }
  merge.refuse("two tokens, as \"a b\" or [\"a\", \"b\"]");
}

std::vector<PairMerge> read_merges(const JsonField& list, const TokenNames& tokens) {
  std::vector<PairMerge> merges;
  merges.reserve(list.size());
  for (size_t i = 0; i < list.size(); ++i) {
    const JsonField merge = list.at(i);
    const auto [left, right] = sides_of(merge);
    const auto id_of = [&](const std::string& name) {
      const auto found = tokens.ids.find(name);
      if (found == tokens.ids.end()) merge.refuse("tokens of model.vocab that make up another");
      return found->second;
    };
    merges.push_back({id_of(left), id_of(right), id_of(left + right), static_cast<uint32_t>(i)});
  }
  return merges;
}

void read_unknown(const JsonField& model, const TokenNames& tokens, PieceAlphabet& alphabet) {
  alphabet.join_unknown = model["fuse_unk"].flag_or(false);
  const JsonField unknown = model["unk_token"];
  if (unknown.is_null()) return;
  const auto found = tokens.ids.find(unknown.text());
  if (found == tokens.ids.end()) unknown.refuse("null or a token of model.vocab");
  alphabet.unknown = found->second;
}

/// A tokenizer that was trained without initial_alphabet lacks the bytes that its texts lacked.
void read_byte_alphabet(const JsonField& model, const TokenNames& tokens, PieceAlphabet& alphabet) {
  bool complete = true;
  for (unsigned byte = 0; byte < 256; ++byte) {
    const auto found = tokens.ids.find(name_of_byte(static_cast<unsigned char>(byte)));
    const bool has_id = found != tokens.ids.end();
    alphabet.bytes[byte] = has_id ? found->second : PieceAlphabet::kNoId;
    complete = complete && has_id;
  }
  if (complete) return;
  if (model["byte_fallback"].flag_or(false) && tokens.ids.contains("<0x00>"))
    model["byte_fallback"].refuse("false where bytes lack a token of ByteLevel");
  read_unknown(model, tokens, alphabet);
}

/// Reads the tokens <0x00> to <0xFF>. Returns whether they are there.
bool read_fallback_bytes(const JsonField& model, const TokenNames& tokens,
                         PieceAlphabet& alphabet) {
  size_t there = 0;
  for (unsigned byte = 0; byte < 256; ++byte) {
    const auto found = tokens.ids.find(fmt::format("<0x{:02X}>", byte));
    if (found == tokens.ids.end()) continue;
    alphabet.bytes[byte] = found->second;
    ++there;
  }
  if (there != 0 && there != 256)
    model["byte_fallback"].refuse(
        fmt::format("false where model.vocab has {} of the tokens <0x00> to <0xFF>", there));
  return there == 256;
}

void read_characters(const JsonField& model, const TokenNames& tokens, PieceAlphabet& alphabet) {
  for (uint32_t id = 0; id < tokens.names.size(); ++id) {
    const std::string& name = tokens.names[id];
    if (name.empty()) continue;
    const Utf8Character first = utf8_character(name, 0);
    if (first.bytes == name.size()) alphabet.characters[first.point] = id;
  }
  alphabet.has_bytes =
      model["byte_fallback"].flag_or(false) && read_fallback_bytes(model, tokens, alphabet);
  read_unknown(model, tokens, alphabet);
}

/// Tokens that stand for no character of the text must not be merged where pieces are cut apart.
void check_merges(const JsonField& list, const std::vector<PairMerge>& merges,
                  const PieceAlphabet& alphabet) {
  std::set<uint32_t> apart;
  if (alphabet.has_bytes) apart.insert(alphabet.bytes.begin(), alphabet.bytes.end());
  if (alphabet.unknown) apart.insert(*alphabet.unknown);
  for (size_t i = 0; i < merges.size(); ++i)
    if (apart.contains(merges[i].left) || apart.contains(merges[i].right))
      list.at(i).refuse("tokens other than those of single bytes and model.unk_token");
}

void expect_plain_bpe(const JsonField& model) {
  const JsonField type = model["type"];
  if (type.text_or("BPE") != "BPE" || (type.is_null() && model["merges"].is_null()))
    type.refuse("BPE");
  model["dropout"].expect_null_or(0.0);
  model["continuing_subword_prefix"].expect_null_or("");
  model["end_of_word_suffix"].expect_null_or("");
}

/// Names a token unless model.vocab has it. The ids are those that PyPI's tokenizers 0.23.3 gives,
/// whatever the file says: a new token's is the number of tokens so far, even if model.vocab has
/// gaps.
uint32_t read_added_id(const JsonField& entry, const std::string& content, TokenNames& tokens) {
  const auto known = tokens.ids.find(content);
  const bool is_new = known == tokens.ids.end();
  const uint32_t id = is_new ? static_cast<uint32_t>(tokens.ids.size()) : known->second;
  if (entry["id"].json() != id) entry["id"].refuse(fmt::format("{}", id));
  if (!is_new) return id;
  if (id >= tokens.names.size()) tokens.names.resize(id + 1);
  if (!tokens.names[id].empty()) entry["id"].refuse("an id that no other token has");
  tokens.names[id] = content;
  tokens.ids.emplace(content, id);
  return id;
}

}  // namespace

TokenNames read_model(const JsonField& model, bool by_bytes, HuggingFaceTokenizerFile& file) {
  expect_plain_bpe(model);
  TokenNames tokens = read_vocabulary(model["vocab"]);
  const JsonField list = model["merges"];
  const std::vector<PairMerge> merges = read_merges(list, tokens);
  PieceAlphabet& alphabet = file.vocabulary.alphabet;
  alphabet.by_bytes = by_bytes;
  if (by_bytes) {
    read_byte_alphabet(model, tokens, alphabet);
  } else {
    read_characters(model, tokens, alphabet);
    check_merges(list, merges, alphabet);
  }
  file.vocabulary.merges = MergeTable(merges);
  if (model["ignore_merges"].flag_or(false)) {
    for (const auto& [name, id] : tokens.ids) {
      const std::optional<std::string> piece = by_bytes ? bytes_of_name(name) : name;
      if (piece) file.vocabulary.whole_pieces.emplace(*piece, id);
    }
  } else if (!by_bytes) {
    std::vector<std::string_view> made;
    for (const PairMerge& merge : merges) made.push_back(tokens.names[merge.result]);
    const bool unknown_vanish = !alphabet.has_bytes && !alphabet.unknown;
    file.apart.emplace(alphabet.characters, made, unknown_vanish);
  }
  return tokens;
}

void read_added_tokens(const JsonField& added, TokenNames& tokens, HuggingFaceTokenizerFile& file) {
  // Special tokens come before others of the same normalized content.
  std::vector<AddedToken> in_text[2], in_normalized[2];
  std::unordered_map<std::string, size_t> places;
  const size_t size = added.is_null() ? 0 : added.size();
  for (size_t i = 0; i < size; ++i) {
    const JsonField entry = added.at(i);
    const std::string content = entry["content"].text();
    if (content.empty() || content.size() > kLongestAdded)
      entry["content"].refuse(fmt::format("1 to {} bytes", kLongestAdded));
    if (entry["single_word"].flag()) entry["single_word"].refuse("false");
    const auto [first, is_first] = places.emplace(content, i);
    if (!is_first) {
      if (entry.json() == added.at(first->second).json()) continue;
      entry["content"].refuse(
          fmt::format("a content that added_tokens[{}] lacks, or an equal entry", first->second));
    }
    const uint32_t id = read_added_id(entry, content, tokens);
    const size_t kind = entry["special"].flag() ? 0 : 1;
    AddedToken token{id, content, entry["lstrip"].flag(), entry["rstrip"].flag()};
    if (!entry["normalized"].flag()) {
      in_text[kind].push_back(std::move(token));
      continue;
    }
    token.content = normalize(file.normalizer, content);
    if (token.content.empty()) entry["content"].refuse("a text that the normalizer keeps");
    in_normalized[kind].push_back(std::move(token));
  }
  for (auto* kinds : {in_text, in_normalized})
    kinds[0].insert(kinds[0].end(), kinds[1].begin(), kinds[1].end());
  file.tokens_in_text = AddedTokenFinder(std::move(in_text[0]));
  file.tokens_in_normalized = AddedTokenFinder(std::move(in_normalized[0]));
}

}  // namespace lockstep
