#include "lockstep/datasets/gpt2_vocabulary.h"

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "lockstep/core/check.h"
#include "lockstep/core/input_file.h"
#include "lockstep/datasets/byte_alphabet.h"
#include "lockstep/datasets/json_field.h"

namespace lockstep {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kEndOfText = "<|endoftext|>";
constexpr size_t kLongestToken = 1024;
constexpr int64_t kLongestFile = int64_t{1} << 30;

/// The names of the two files, as they were published and as Hugging Face has them.
constexpr std::pair<const char*, const char*> kTokensAndMerges[] = {{"encoder.json", "vocab.bpe"},
                                                                    {"vocab.json", "merges.txt"}};

std::string bytes_of_token(std::string_view name, const std::string& place) {
  const std::optional<std::string> bytes = bytes_of_name(name);
  require<FileError>(bytes.has_value(), "{}: found '{}', allowed: characters of GPT-2's alphabet",
                     place, name);
  require<FileError>(!bytes->empty(), "{}: found an empty token", place);
  return *bytes;
}

/// Calls `visit` with each line that is not empty, without its end, and its number from 1 on.
void for_each_line(std::string_view text,
                   const std::function<void(std::string_view, size_t)>& visit) {
  for (size_t number = 1; !text.empty(); ++number) {
    std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (!line.empty()) visit(line, number);
  }
}

void fill_byte_ids(Gpt2Vocabulary& vocabulary) {
  for (size_t byte = 0; byte < vocabulary.byte_ids.size(); ++byte) {
    const auto found = vocabulary.ids.find(std::string(1, static_cast<char>(byte)));
    require<FileError>(found != vocabulary.ids.end(),
                       "'{}': found no token for byte {}, allowed: all 256", vocabulary.path, byte);
    vocabulary.byte_ids[byte] = found->second;
  }
}

void read_encoder(std::string_view text, Gpt2Vocabulary& vocabulary) {
  const std::string& path = vocabulary.path;
  Json json;
  try {
    json = Json::parse(text);
  } catch (const Json::exception& error) {
    fail<FileError>("'{}' is damaged: {}", path, problem_of(error));
  }
  require<FileError>(json.is_object(), "'{}': found no JSON object of tokens and ids", path);
  std::vector<std::string>& tokens = vocabulary.tokens;
  tokens.resize(json.size());
  for (const auto& [name, value] : json.items()) {
    const std::string place = fmt::format("'{}': token '{}'", path, name);
    const bool good = value.is_number_unsigned() && value.get<uint64_t>() < tokens.size();
    require<FileError>(good, "{}: id: found {}, allowed: 0 to {}", place, value.dump(),
                       tokens.size() - 1);
    const auto id = value.get<uint32_t>();
    require<FileError>(tokens[id].empty(), "{}: id: found {}, which another token has", place, id);
    tokens[id] = bytes_of_token(name, place);
    vocabulary.ids[tokens[id]] = id;
  }
  const auto end = vocabulary.ids.find(kEndOfText);
  if (end != vocabulary.ids.end()) vocabulary.end_of_text = end->second;
}

PairMerge parse_merge(std::string_view line, uint32_t rank, const std::string& place,
                      const Gpt2Vocabulary& vocabulary) {
  const size_t space = line.find(' ');
  require<FileError>(space != line.npos && line.find(' ', space + 1) == line.npos,
                     "{}: found '{}', allowed: two tokens with a space between", place, line);
  const auto id_of = [&](const std::string& bytes) {
    const auto found = vocabulary.ids.find(bytes);
    require<FileError>(found != vocabulary.ids.end(), "{}: found '{}', allowed: tokens of '{}'",
                       place, line, vocabulary.path);
    return found->second;
  };
  const std::string left = bytes_of_token(line.substr(0, space), place);
  const std::string right = bytes_of_token(line.substr(space + 1), place);
  return {id_of(left), id_of(right), id_of(left + right), rank};
}

int value_of_base64(char c) {
  if (c >= 'A' && c <= 'Z') return c - 'A';
  if (c >= 'a' && c <= 'z') return c - 'a' + 26;
  if (c >= '0' && c <= '9') return c - '0' + 52;
  return c == '+' ? 62 : c == '/' ? 63 : -1;
}

/// The bytes; unset if `text` is not base64 with its padding.
std::optional<std::string> decode_base64(std::string_view text) {
  if (text.size() % 4 != 0) return std::nullopt;
  size_t padding = 0;
  while (padding < 2 && padding < text.size() && text[text.size() - 1 - padding] == '=') ++padding;
  std::string bytes;
  uint32_t bits = 0;
  for (size_t i = 0; i < text.size() - padding; ++i) {
    const int value = value_of_base64(text[i]);
    if (value < 0) return std::nullopt;
    bits = bits << 6 | static_cast<uint32_t>(value);
    if (i % 4 != 0) bytes.push_back(static_cast<char>(bits >> (6 - 2 * (i % 4))));
  }
  return bytes;
}

void read_rank(std::string_view line, const std::string& place, Gpt2Vocabulary& vocabulary) {
  const size_t space = std::min(line.find(' '), line.size());
  const std::optional<std::string> bytes = decode_base64(line.substr(0, space));
  const std::string_view number = line.substr(std::min(space + 1, line.size()));
  uint32_t id = 0;
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), id);
  const bool good = bytes && error == std::errc() && end == number.data() + number.size();
  require<FileError>(good, "{}: found '{}', allowed: a token in base64, a space and its id", place,
                     line);
  require<FileError>(!bytes->empty() && bytes->size() <= kLongestToken,
                     "{}: found a token of {} bytes, allowed: 1 to {}", place, bytes->size(),
                     kLongestToken);
  require<FileError>(vocabulary.ids.emplace(*bytes, id).second, "{}: found the token '{}' twice",
                     place, line.substr(0, space));
}

void order_ranks(Gpt2Vocabulary& vocabulary) {
  const size_t count = vocabulary.ids.size();
  vocabulary.tokens.resize(count + 1);
  for (const auto& [bytes, id] : vocabulary.ids) {
    require<FileError>(id <= count, "'{}': found the id {} among {} tokens, allowed: 0 to {}",
                       vocabulary.path, id, count, count);
    require<FileError>(vocabulary.tokens[id].empty(), "'{}': found the id {} twice",
                       vocabulary.path, id);
    vocabulary.tokens[id] = bytes;
  }
  const auto gap = std::find(vocabulary.tokens.begin(), vocabulary.tokens.end(), "");
  vocabulary.end_of_text = static_cast<uint32_t>(gap - vocabulary.tokens.begin());
  *gap = kEndOfText;
}

/// Finds every way to make a token of two.
void find_merges(Gpt2Vocabulary& vocabulary) {
  for (const auto& [bytes, id] : vocabulary.ids)
    for (size_t cut = 1; cut < bytes.size(); ++cut) {
      const std::string_view all = bytes;
      const auto left = vocabulary.ids.find(all.substr(0, cut));
      if (left == vocabulary.ids.end()) continue;
      const auto right = vocabulary.ids.find(all.substr(cut));
      if (right == vocabulary.ids.end()) continue;
      vocabulary.merges.push_back({left->second, right->second, id, id});
    }
}

}  // namespace

Gpt2Vocabulary parse_gpt2_vocabulary(std::string_view encoder, const std::string& encoder_path,
                                     std::string_view merges, const std::string& merges_path) {
  Gpt2Vocabulary vocabulary;
  vocabulary.path = encoder_path;
  read_encoder(encoder, vocabulary);
  fill_byte_ids(vocabulary);
  std::set<std::pair<uint32_t, uint32_t>> pairs;
  for_each_line(merges, [&](std::string_view line, size_t number) {
    if (number == 1 && line.starts_with("#version")) return;
    const std::string place = fmt::format("'{}': line {}", merges_path, number);
    const auto merge =
        parse_merge(line, static_cast<uint32_t>(vocabulary.merges.size()), place, vocabulary);
    require<FileError>(pairs.emplace(merge.left, merge.right).second, "{}: found '{}' twice", place,
                       line);
    vocabulary.merges.push_back(merge);
  });
  return vocabulary;
}

Gpt2Vocabulary parse_tiktoken_ranks(std::string_view text, const std::string& path) {
  Gpt2Vocabulary vocabulary;
  vocabulary.path = path;
  vocabulary.keep_pieces = true;
  for_each_line(text, [&](std::string_view line, size_t number) {
    read_rank(line, fmt::format("'{}': line {}", path, number), vocabulary);
  });
  fill_byte_ids(vocabulary);
  order_ranks(vocabulary);
  find_merges(vocabulary);
  return vocabulary;
}

Gpt2Vocabulary read_gpt2_vocabulary(const std::string& folder) {
  const auto in_folder = [&](const char* name) { return folder + "/" + name; };
  const auto is_there = [](const std::string& path) {
    return kind_of_file(path) != FileKind::none;
  };
  const auto read = [](const std::string& path) {
    return read_file(path, kLongestFile, /*follow_links=*/true);
  };
  for (const auto& [tokens, pairs] : kTokensAndMerges) {
    const std::string encoder = in_folder(tokens), merges = in_folder(pairs);
    if (is_there(encoder) || is_there(merges))
      return parse_gpt2_vocabulary(read(encoder), encoder, read(merges), merges);
  }
  for (const char* name : {"gpt2.tiktoken", "r50k_base.tiktoken", "p50k_base.tiktoken"})
    if (is_there(in_folder(name)))
      return parse_tiktoken_ranks(read(in_folder(name)), in_folder(name));
  fail<FileError>(
      "'{}/' has no vocabulary of GPT-2's encoding; allowed: encoder.json and vocab.bpe, "
      "vocab.json and merges.txt, or gpt2.tiktoken, r50k_base.tiktoken or p50k_base.tiktoken",
      folder);
}

}  // namespace lockstep
