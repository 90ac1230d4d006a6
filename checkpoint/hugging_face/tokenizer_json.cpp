#include "lockstep/checkpoint/tokenizer_json.h"

#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/datasets/byte_alphabet.h"

namespace lockstep {
namespace {

std::string name_of_token(const std::string& bytes) {
  std::string name;
  for (const char byte : bytes) name += name_of_byte(static_cast<unsigned char>(byte));
  return name;
}

}  // namespace

std::string with_tokenizer_class(nlohmann::json config, const std::string& end) {
  config["tokenizer_class"] = "PreTrainedTokenizerFast";
  config.emplace("clean_up_tokenization_spaces", false);
  if (!end.empty()) config.emplace("eos_token", end);
  return config.dump(2) + "\n";
}

std::string text_of_end(Tokenizer& tokenizer) {
  try {
    const int64_t id = tokenizer.end_of_document();
    const std::string text = tokenizer.decode({id});
    return tokenizer.encode(text) == std::vector{id} ? text : "";
  } catch (const FileError&) {
    return "";
  }
}

std::string gpt2_tokenizer_json(const Gpt2Vocabulary& vocabulary) {
  using Json = nlohmann::json;
  Json tokens = Json::object(), merges = Json::array(), added = Json::array();
  std::vector<std::string> names;
  for (const std::string& bytes : vocabulary.tokens) {
    names.push_back(name_of_token(bytes));
    tokens[names.back()] = names.size() - 1;
  }
  for (const PairMerge& merge : vocabulary.merges)
    merges.push_back({names[merge.left], names[merge.right]});
  if (vocabulary.end_of_text)
    added.push_back({{"id", *vocabulary.end_of_text},
                     {"content", names[*vocabulary.end_of_text]},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", true}});
  const Json bytes = {{"type", "ByteLevel"},
                      {"add_prefix_space", false},
                      {"trim_offsets", true},
                      {"use_regex", true}};
  const Json json = {{"version", "1.0"},
                     {"truncation", nullptr},
                     {"padding", nullptr},
                     {"added_tokens", added},
                     {"normalizer", nullptr},
                     {"pre_tokenizer", bytes},
                     {"post_processor", nullptr},
                     {"decoder", bytes},
                     {"model",
                      {{"type", "BPE"},
                       {"dropout", nullptr},
                       {"unk_token", nullptr},
                       {"continuing_subword_prefix", nullptr},
                       {"end_of_word_suffix", nullptr},
                       {"fuse_unk", false},
                       {"byte_fallback", false},
                       {"ignore_merges", false},
                       {"vocab", tokens},
                       {"merges", merges}}}};
  return json.dump() + "\n";
}

}  // namespace lockstep
