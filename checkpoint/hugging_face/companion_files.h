#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "lockstep/core/config.h"
#include "lockstep/datasets/tokenizer.h"

/// What lies beside the weights in Hugging Face's folders: the tokenizer's files and
/// generation_config.json. Needs no libtorch.
namespace lockstep {

inline constexpr const char* kGenerationConfigFile = "generation_config.json";

struct KeptTokenizer {
  std::string name;  ///< for data.tokenizer
  std::string note;  ///< why it is `byte` although `in` has one; empty otherwise
};

/// The tokenizer of a model in `in`, once keep_companions() has copied its files: tokenizer.json,
/// else tokenizer.model, else, where `is_gpt2`, vocab.json with merges.txt: the first that can be
/// used, or `byte`. FileError where it cannot be found out what is there.
KeptTokenizer choose_tokenizer(const std::string& in, const std::string& folder, bool is_gpt2);

/// Copies the companions of `in` to `folder`/hugging_face. FileError.
void keep_companions(const std::string& in, const std::string& folder);

struct Companions {
  std::map<std::string, std::string> files;  ///< path of the original, by name
  std::string generation_config;             ///< its text
  std::string note;  ///< why the tokenizer does not come along; empty where it does
};

/// The ids that end a text of a model with this configuration: the end of a document, where
/// `tokenizer`, that of data.tokenizer, has one, and eos_token_id of the generation_config.json
/// beside its files. FileError, where that is damaged.
std::set<int64_t> ends_of_text(const Config& config, const Tokenizer& tokenizer);

/// What an export of a model with this configuration has beside its weights. The generation_config
/// is that which lies beside the tokenizer; else one with the end of a document, where the model
/// has a token for it.
Companions find_companions(const Config& config);

}  // namespace lockstep
