#include "lockstep/checkpoint/companion_files.h"

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/companion_record.h"
#include "lockstep/checkpoint/moved_tokenizer.h"
#include "lockstep/core/check.h"
#include "lockstep/core/counted.h"
#include "lockstep/core/input_file.h"
#include "lockstep/core/tensor_parallel_rules.h"
#include "lockstep/datasets/json_field.h"
#include "lockstep/datasets/unfinished_file.h"

namespace lockstep {
namespace {

namespace paths = std::filesystem;

constexpr int64_t kLongestCompanion = int64_t{1} << 30;
constexpr const char* kTokenizerJson = "tokenizer.json";
constexpr const char* kTokenizerModel = "tokenizer.model";
constexpr const char* kVocabulary = "vocab.json";
constexpr const char* kMerges = "merges.txt";
constexpr const char* kAddedTokens = "added_tokens.json";
constexpr const char* kCompanions[] = {
    kTokenizerJson, kTokenizerModel,         kVocabulary,
    kMerges,        "tokenizer_config.json", "special_tokens_map.json",
    kAddedTokens,   "chat_template.jinja",   kGenerationConfigFile};

bool has_file(const paths::path& path) { return kind_of_file(path) == FileKind::regular; }

paths::path kept_in(const std::string& folder) {
  return paths::weakly_canonical(paths::absolute(folder)) / kKeptFolder;
}

/// Returns whether it was not there.
bool make_folder(const paths::path& folder) {
  std::error_code failure;
  const bool is_new = paths::create_directories(folder, failure);
  require<FileError>(!failure, "'{}' cannot be created: {}", folder.string(), failure.message());
  return is_new;
}

/// A tokenizer format, as data.tokenizer names it.
struct TokenizerForm {
  const char* kind;
  const char* file;  ///< empty: the folder
  std::vector<const char*> needed;

  std::string name_in(const paths::path& folder) const {
    return std::string(kind) + ":" + (*file == 0 ? folder : folder / file).string();
  }
};

/// The forms that the folder has files for, best first.
std::vector<TokenizerForm> forms_in(const paths::path& folder, bool is_gpt2) {
  std::vector<TokenizerForm> forms = {{"hf", kTokenizerJson, {kTokenizerJson}},
                                      {"sentencepiece", kTokenizerModel, {kTokenizerModel}}};
  if (is_gpt2) forms.push_back({"gpt2", "", {kVocabulary, kMerges}});
  std::erase_if(forms, [&](const TokenizerForm& form) {
    return !std::all_of(form.needed.begin(), form.needed.end(),
                        [&](const char* name) { return has_file(folder / name); });
  });
  return forms;
}

/// The files of a tokenizer, keyed by Hugging Face's names for them.
std::map<std::string, std::string> tokenizer_files(const std::string& name) {
  const size_t colon = name.find(':');
  if (colon == std::string::npos) return {};
  const std::string kind = name.substr(0, colon);
  const paths::path path = name.substr(colon + 1);
  const paths::path folder = kind == "gpt2" ? path : path.parent_path();
  std::map<std::string, std::string> files;
  if (kind != "sentencepiece" || path.filename() == kTokenizerModel)
    for (const char* const companion : kCompanions)
      if (has_file(folder / companion)) files[companion] = folder / companion;
  if (kind == "hf") files[kTokenizerJson] = path;
  if (kind == "sentencepiece") files[kTokenizerModel] = path;
  if (kind == "gpt2" && has_file(folder / "encoder.json")) {
    files[kVocabulary] = folder / "encoder.json";
    files[kMerges] = folder / "vocab.bpe";
  }
  return files;
}

bool has_tokenizer(const std::map<std::string, std::string>& files) {
  return files.contains(kTokenizerJson) || files.contains(kTokenizerModel) ||
         (files.contains(kVocabulary) && files.contains(kMerges));
}

/// The companions that an import kept in the folder beside the checkpoint.
std::map<std::string, std::string> kept_companions(const std::string& checkpoint) {
  const paths::path kept =
      kept_in(paths::weakly_canonical(paths::absolute(checkpoint)).parent_path());
  std::map<std::string, std::string> files;
  for (const char* const name : kCompanions)
    if (has_file(kept / name)) files[name] = kept / name;
  return files;
}

/// Whether the vocabulary is the tokenizer's, padded or not. `byte` is also the tokenizer of models
/// for which nothing says what their ids mean.
bool is_byte_model(const TransformerConfig& model) {
  TransformerConfig bytes = model;
  bytes.vocab_size = ByteTokenizer().vocabulary_size();
  return model.vocab_size == bytes.vocab_size ||
         model.vocab_size == padded_vocab_size(bytes, /*tensor_parallel=*/1);
}

/// The token that ends a document; unset if the vocabulary has none.
std::optional<int64_t> end_of_document(const Tokenizer& tokenizer) {
  try {
    return tokenizer.end_of_document();
  } catch (const FileError&) {
    return std::nullopt;
  }
}

std::string new_generation_config(const Config& config, const Tokenizer& tokenizer) {
  nlohmann::ordered_json json = {{"_from_model_config", true}};
  const bool knows_ends = config.data.tokenizer != "byte" || is_byte_model(config.model);
  if (const auto id = end_of_document(tokenizer); id && knows_ends && *id < config.model.vocab_size)
    json["eos_token_id"] = *id;
  return json.dump(2) + "\n";
}

bool is_id(const nlohmann::ordered_json& json) {
  return json.is_number_unsigned() && json.get<uint64_t>() <= std::numeric_limits<uint32_t>::max();
}

/// The generation_config.json that transformers would derive from the config.json; empty if that
/// has no ids for one.
std::string derived_generation_config(const std::string& config_json) {
  const auto config = nlohmann::ordered_json::parse(config_json);
  nlohmann::ordered_json json = {{"_from_model_config", true}};
  for (const char* const key : {"bos_token_id", "eos_token_id"}) {
    const auto found = config.find(key);
    if (found == config.end()) continue;
    const bool ids =
        found->is_array() && !found->empty() && std::all_of(found->begin(), found->end(), is_id);
    if (ids || is_id(*found)) json[key] = *found;
  }
  return json.size() > 1 ? json.dump(2) + "\n" : "";
}

nlohmann::json parse_file(const std::string& path) {
  const std::string text = read_file(path, kLongestCompanion, /*follow_links=*/true);
  try {
    return nlohmann::json::parse(text);
  } catch (const nlohmann::json::exception& error) {
    fail<FileError>("'{}' is damaged: {}", path, problem_of(error));
  }
}

/// Which tokens of `in` the tokenizer of its tokenizer.model lacks; empty: none. `problem` is why a
/// better form cannot be used.
std::string note_on_added_tokens(const paths::path& in, const Tokenizer& tokenizer,
                                 const std::string& problem) {
  const std::string path = in / kAddedTokens;
  if (!has_file(path)) return "";
  std::vector<std::string> lacking;
  try {
    const nlohmann::json json = parse_file(path);
    const JsonField root(json, path);
    for (const auto& [token, id] : root.object())
      if (is_int64(id) && id.get<int64_t>() >= tokenizer.vocabulary_size())
        lacking.push_back(token);
  } catch (const FileError& error) {
    return error.what();
  }
  if (lacking.empty()) return "";
  return fmt::format(
      "data.tokenizer is sentencepiece: '{}': found {} that {} lacks, such as '{}'; texts with "
      "them need a {}{}",
      path, counted(static_cast<int64_t>(lacking.size()), "token"), kTokenizerModel,
      lacking.front(), kTokenizerJson, problem.empty() ? "" : fmt::format(" (here: {})", problem));
}

}  // namespace

bool is_companion_file(const std::string& name) {
  return std::find(std::begin(kCompanions), std::end(kCompanions), name) != std::end(kCompanions);
}

KeptTokenizer choose_tokenizer(const std::string& in, const std::string& folder, bool is_gpt2) {
  std::string problem;
  for (const TokenizerForm& form : forms_in(in, is_gpt2)) {
    try {
      const auto tokenizer = make_tokenizer(form.name_in(in), "data.tokenizer");
      const bool may_lack = form.kind == std::string_view("sentencepiece");
      return {form.name_in(kept_in(folder)),
              may_lack ? note_on_added_tokens(in, *tokenizer, problem) : ""};
    } catch (const Error& error) {
      if (problem.empty()) problem = error.what();
    }
  }
  KeptTokenizer result{"byte", ""};
  if (!problem.empty()) result.note = fmt::format("data.tokenizer is byte: {}", problem);
  if (problem.empty() && has_file(paths::path(in) / kVocabulary) &&
      has_file(paths::path(in) / kMerges))
    result.note = fmt::format(
        "data.tokenizer is byte: '{}': found {} and {}, allowed for another model than GPT-2: {} "
        "or {}",
        in, kVocabulary, kMerges, kTokenizerJson, kTokenizerModel);
  return result;
}

void copy_companions(const std::string& in, const std::string& copies,
                     const std::string& config_json) {
  make_folder(copies);
  for (const char* const name : kCompanions) {
    const paths::path from = paths::path(in) / name;
    if (has_file(from))
      write_file(paths::path(copies) / name,
                 {read_file(from, kLongestCompanion, /*follow_links=*/true)});
  }
  if (has_file(paths::path(in) / kGenerationConfigFile)) return;
  const std::string text = derived_generation_config(config_json);
  if (!text.empty()) write_file(paths::path(copies) / kGenerationConfigFile, {text});
}

KeptCompanions::KeptCompanions(const std::string& copies, const std::string& folder)
    : copies_(copies),
      kept_(kept_in(folder)),
      earlier_(kept_.parent_path() / ("step_0" + std::string(kCompanionRecord))) {}

KeptCompanions::~KeptCompanions() { put_back(); }

void KeptCompanions::put_in_place() {
  const std::vector<std::string> names(std::begin(kCompanions), std::end(kCompanions));
  made_folder_ = make_folder(kept_);
  begin_companion_record(earlier_, copies_.string() + ".record", names);
  for (const std::string& name : names) replace(name);
  sync_folder(earlier_);
  sync_folder(kept_);
  std::error_code failure;
  paths::remove(copies_, failure);
  require<FileError>(!failure, "'{}' cannot be removed: {}", copies_.string(), failure.message());
}

void KeptCompanions::replace(const std::string& name) const {
  const auto move = [&](const paths::path& from, const paths::path& to) {
    std::error_code failure;
    if (kind_of_file(from, /*follow_links=*/false) != FileKind::none)
      paths::rename(from, to, failure);
    require<FileError>(!failure, "'{}' cannot be replaced: {}", (kept_ / name).string(),
                       failure.message());
  };
  move(kept_ / name, earlier_ / name);
  move(copies_ / name, kept_ / name);
}

void KeptCompanions::put_back() noexcept {
  try {
    settle_companion_record(earlier_);
  } catch (const std::exception&) {  // then the next save tries again
  }
  std::error_code is_not_empty;
  if (made_folder_) paths::remove(kept_, is_not_empty);
}

std::string KeptCompanions::keep() {
  made_folder_ = false;
  try {
    return drop_companion_record(earlier_);
  } catch (const FileError& error) {
    return error.what();
  }
}

std::set<int64_t> ends_of_text(const Config& config, const Tokenizer& tokenizer) {
  std::set<int64_t> ends;
  if (const auto id = end_of_document(tokenizer)) ends.insert(*id);
  const auto files = tokenizer_files(config.data.tokenizer);
  const auto found = files.find(kGenerationConfigFile);
  if (found == files.end()) return ends;
  const nlohmann::json json = parse_file(found->second);
  const JsonField ids = JsonField(json, found->second)["eos_token_id"];
  constexpr uint32_t kMost = std::numeric_limits<uint32_t>::max();
  if (ids.json().is_array())
    for (size_t i = 0; i < ids.size(); ++i) ends.insert(ids.at(i).number(kMost));
  else if (!ids.is_null())
    ends.insert(ids.number(kMost));
  return ends;
}

Companions find_companions(const Config& config, const std::string& checkpoint) {
  Companions result;
  const std::string& name = config.data.tokenizer;
  try {
    const auto tokenizer = make_tokenizer(name, "data.tokenizer");
    result.files = name == "byte" ? kept_companions(checkpoint) : tokenizer_files(name);
    const auto found = result.files.find(kGenerationConfigFile);
    result.generation_config = found == result.files.end()
                                   ? new_generation_config(config, *tokenizer)
                                   : read_file(found->second, kLongestCompanion, true);
    result.files.erase(kGenerationConfigFile);
    if (name != "byte" && !has_tokenizer(result.files))
      result.note = fmt::format(
          "the tokenizer '{}' is left out: it consists of tiktoken's ranks, allowed: vocab.json "
          "and merges.txt, or encoder.json and vocab.bpe",
          name);
  } catch (const Error& error) {
    result = {.files = {},
              .generation_config = "{\n  \"_from_model_config\": true\n}\n",
              .note = fmt::format("the tokenizer '{}' is left out: {}", name, error.what())};
  }
  return result;
}

}  // namespace lockstep
