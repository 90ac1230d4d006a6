#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "lockstep/core/config.h"
#include "lockstep/datasets/tokenizer.h"

/// The files next to the weights in Hugging Face's folders: the tokenizer's files and
/// generation_config.json. Needs no libtorch.
namespace lockstep {

inline constexpr const char* kGenerationConfigFile = "generation_config.json";

struct KeptTokenizer {
  std::string name;  ///< for data.tokenizer
  /// Why it is `byte` although `in` has a tokenizer, or that it lacks tokens of added_tokens.json;
  /// empty otherwise.
  std::string note;
};

/// The tokenizer of a model in `in`, after KeptCompanions has taken its files: the first that
/// can be used of tokenizer.json, tokenizer.model and, if `is_gpt2`, vocab.json with merges.txt; or
/// `byte`. FileError if it cannot be determined what is there.
KeptTokenizer choose_tokenizer(const std::string& in, const std::string& folder, bool is_gpt2);

/// Whether a file of that name belongs to the tokenizer, or is the generation_config.json.
bool is_companion_file(const std::string& name);

/// Copies the companions of `in` to `copies`, a new folder. If there is no generation_config.json,
/// writes one with the ids of `config_json`, its config.json, as transformers does. FileError.
void copy_companions(const std::string& in, const std::string& copies,
                     const std::string& config_json);

/// Moves companions from the folder `copies` to `folder`/hugging_face, on the same file system,
/// where they take the place of those of an earlier import. Unless keep() is called, those come
/// back with the destructor if step_0 of `folder` is still as it was. If the process is killed
/// before, the next save or clean-up there does the same; see companion_record.h.
class KeptCompanions {
 public:
  /// Moves nothing yet.
  KeptCompanions(const std::string& copies, const std::string& folder);
  ~KeptCompanions();
  KeptCompanions(const KeptCompanions&) = delete;
  KeptCompanions& operator=(const KeptCompanions&) = delete;

  /// Moves them, and removes the folder `copies`. FileError.
  void put_in_place();
  /// step_0 was replaced. Returns what cannot be removed and why; empty if there is nothing.
  std::string keep();

 private:
  void replace(const std::string& name) const;
  void put_back() noexcept;

  std::filesystem::path copies_, kept_;
  std::filesystem::path earlier_;  ///< the record, with the files that were there
  bool made_folder_ = false;       ///< kept_ was not there
};

struct Companions {
  std::map<std::string, std::string> files;  ///< path of the original, by name
  std::map<std::string, std::string> texts;  ///< text of a new file, by name
  /// Why the tokenizer is not included, or may be another one in transformers; empty if neither.
  std::string note;
};

/// The ids that end a text of a model with this configuration: the end of a document, if
/// `tokenizer`, which is that of data.tokenizer, has one; eos_token_id of the
/// generation_config.json next to its files; and, after train.task = sft, the token that ends the
/// assistant's messages in data.chat_template. FileError if that file is damaged.
std::set<int64_t> ends_of_text(const Config& config, const Tokenizer& tokenizer);

/// What an export of the model of `checkpoint`, with this configuration, contains besides its
/// weights. The generation_config is the one next to the tokenizer; otherwise one with the end of a
/// document, if the model has a token for it. After train.task = sft it also has the end of the
/// assistant's messages. With the tokenizer `byte`, they are what an import kept beside the
/// checkpoint, whose tokenizer could not be used; otherwise a generation_config names an end only
/// if the vocabulary is that of bytes.
///
/// transformers chooses a tokenizer's class by tokenizer_config.json, or else by the model's
/// family, and most classes cut texts by rules of their own. So with the tokenizers gpt2 and hf a
/// tokenizer_config.json that names no class gets one that follows tokenizer.json, and GPT-2's
/// vocabulary becomes a tokenizer.json too.
Companions find_companions(const Config& config, const std::string& checkpoint);

}  // namespace lockstep
