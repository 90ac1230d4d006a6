#include "lockstep/datasets/hugging_face_file.h"

#include <filesystem>

#include "lockstep/core/input_file.h"
#include "lockstep/datasets/hugging_face_model.h"
#include "lockstep/datasets/json_field.h"

namespace lockstep {
namespace {

using Json = JsonField::Json;

constexpr int64_t kLongestJson = int64_t{1} << 30;
constexpr std::string_view kKnownEnds[] = {"<|endoftext|>", "</s>", "<|end_of_text|>",
                                           "<\xEF\xBD\x9C"
                                           "end\xE2\x96\x81of\xE2\x96\x81sentence\xEF\xBD\x9C>",
                                           "<eos>"};

Json parse_json(std::string_view text, const std::string& path) {
  try {
    return Json::parse(text);
  } catch (const Json::exception& error) {
    fail<FileError>("'{}' is damaged: {}", path, problem_of(error));
  }
}

std::optional<uint32_t> id_of(std::string_view name, const TokenNames& tokens) {
  const auto found = tokens.ids.find(name);
  return found == tokens.ids.end() ? std::nullopt : std::optional(found->second);
}

/// The id of a key of tokenizer_config.json, whose value is a token or an object with one.
std::optional<uint32_t> id_of(const JsonField& token, const TokenNames& tokens) {
  return id_of(token.json().is_object() ? token["content"].text() : token.text(), tokens);
}

void read_ends(const TokenNames& tokens, const std::optional<std::string>& config,
               const std::string& config_path, HuggingFaceTokenizerFile& file) {
  const Json json = config ? parse_json(*config, config_path) : Json::object();
  const JsonField root(json, config_path), begin = root["bos_token"], end = root["eos_token"];
  if (!begin.is_null()) file.begin_of_text = id_of(begin, tokens);
  if (!end.is_null()) {
    file.end_of_document = id_of(end, tokens);
    if (!file.end_of_document) end.refuse(fmt::format("a token of '{}'", file.path));
  }
  for (const std::string_view name : kKnownEnds)
    if (!file.end_of_document) file.end_of_document = id_of(name, tokens);
}

}  // namespace

HuggingFaceTokenizerFile parse_hugging_face_tokenizer(std::string_view text,
                                                      const std::string& path,
                                                      const std::optional<std::string>& config,
                                                      const std::string& config_path) {
  const Json json = parse_json(text, path);
  const JsonField root(json, path);
  HuggingFaceTokenizerFile file;
  file.path = path;
  read_normalizer(root["normalizer"], file);
  const bool by_bytes = read_pre_tokenizer(root["pre_tokenizer"], file);
  TokenNames tokens = read_model(root["model"], by_bytes, file);
  read_added_tokens(root["added_tokens"], tokens, file);
  check_post_processor(root["post_processor"]);
  file.bytes = read_decoder(root["decoder"], tokens);
  file.vocabulary_size = static_cast<int64_t>(tokens.names.size());
  require<FileError>(file.vocabulary_size > 0, "'{}': found no token", path);
  read_ends(tokens, config, config_path, file);
  return file;
}

HuggingFaceTokenizerFile read_hugging_face_tokenizer(const std::string& path) {
  const auto read = [](const std::string& from) {
    return read_file(from, kLongestJson, /*follow_links=*/true);
  };
  const std::filesystem::path beside =
      std::filesystem::path(path).parent_path() / "tokenizer_config.json";
  const std::string text = read(path);
  std::optional<std::string> config;
  if (kind_of_file(beside.string()) != FileKind::none) config = read(beside.string());
  return parse_hugging_face_tokenizer(text, path, config, beside.string());
}

}  // namespace lockstep
