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
#include "lockstep/checkpoint/hugging_face_families.h"
#include "lockstep/checkpoint/moved_tokenizer.h"
#include "lockstep/checkpoint/tokenizer_json.h"
#include "lockstep/core/check.h"
#include "lockstep/core/counted.h"
#include "lockstep/core/input_file.h"
#include "lockstep/core/tensor_parallel_rules.h"
#include "lockstep/datasets/chat_form.h"
#include "lockstep/datasets/gpt2_vocabulary.h"
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
constexpr const char* kTokenizerConfig = "tokenizer_config.json";
constexpr const char* kCompanions[] = {
    kTokenizerJson, kTokenizerModel,       kVocabulary,
    kMerges,        kTokenizerConfig,      "special_tokens_map.json",
    kAddedTokens,   "chat_template.jinja", kGenerationConfigFile};

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
  std::string_view kind;
  std::vector<const char*> needed;  ///< the file with the tokens first

  std::string name_in(const paths::path& folder) const {
    const paths::path path = needed.size() == 1 ? folder / needed.front() : folder;
    return fmt::format("{}:{}", kind, path.string());
  }
};

/// The forms that the folder has files for, best first.
std::vector<TokenizerForm> forms_in(const paths::path& folder, bool is_gpt2) {
  std::vector<TokenizerForm> forms = {{"hf", {kTokenizerJson}},
                                      {"sentencepiece", {kTokenizerModel}}};
  if (is_gpt2) forms.push_back({"gpt2", {kVocabulary, kMerges}});
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

/// The token that ends the assistant's messages in the conversations that the model was tuned on;
/// unset if it was tuned on none, or if that is the end of a document.
std::optional<int64_t> end_of_message(const Config& config, const Tokenizer& tokenizer) {
  const std::string_view end = chat_form(config.data.chat_template).end;
  if (config.train.task != TrainTask::sft || end.empty()) return std::nullopt;
  const std::vector<int64_t> ids = tokenizer.clone()->encode(end);
  return ids.size() == 1 ? std::optional(ids.front()) : std::nullopt;
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

/// The ends of text that the generation_config.json at `path` lists.
std::vector<int64_t> listed_ends(const nlohmann::json& json, const std::string& path) {
  constexpr uint32_t kMost = std::numeric_limits<uint32_t>::max();
  const JsonField ids = JsonField(json, path)["eos_token_id"];
  if (ids.is_null()) return {};
  if (!ids.json().is_array()) return {ids.number(kMost)};
  std::vector<int64_t> ends;
  for (size_t i = 0; i < ids.size(); ++i) ends.push_back(ids.at(i).number(kMost));
  return ends;
}

/// The generation_config.json of an export whose tokenizer has the given files.
std::string generation_config(const Config& config, const Tokenizer& tokenizer,
                              const std::map<std::string, std::string>& files) {
  const auto kept = files.find(kGenerationConfigFile);
  const auto of_message = end_of_message(config, tokenizer);
  if (kept != files.end() && !of_message) return read_file(kept->second, kLongestCompanion, true);
  nlohmann::json json = {{"_from_model_config", true}};
  if (kept != files.end()) json = parse_file(kept->second);
  std::vector<int64_t> ends;
  if (kept != files.end()) ends = listed_ends(json, kept->second);
  const bool knows_ends = config.data.tokenizer != "byte" || is_byte_model(config.model);
  const auto of_document = end_of_document(tokenizer);
  if (ends.empty() && of_document && knows_ends && *of_document < config.model.vocab_size)
    ends.push_back(*of_document);
  if (of_message && std::find(ends.begin(), ends.end(), *of_message) == ends.end())
    ends.push_back(*of_message);
  if (!ends.empty()) json["eos_token_id"] = ends;
  if (ends.size() == 1) json["eos_token_id"] = ends.front();
  return json.dump(2) + "\n";
}

/// Adds to `companions` what AutoTokenizer needs to encode as `tokenizer` does, and tells where it
/// does not nevertheless.
void complete_tokenizer(const Config& config, Tokenizer& tokenizer, Companions& companions) {
  const std::string& name = config.data.tokenizer;
  const size_t colon = name.find(':');
  const bool is_gpt2 = name.substr(0, colon) == "gpt2";
  if ((!is_gpt2 && name.substr(0, colon) != "hf") || !has_tokenizer(companions.files)) return;
  const auto given = companions.files.find(kTokenizerConfig);
  const bool is_given = given != companions.files.end();
  const std::string path = is_given ? given->second : kTokenizerConfig;
  const nlohmann::json json = is_given ? parse_file(path) : nlohmann::json::object();
  const std::string chosen = JsonField(json, path)["tokenizer_class"].text_or("");
  if (chosen.empty()) {
    std::string end;
    if (is_gpt2) {
      const Gpt2Vocabulary vocabulary = read_gpt2_vocabulary(name.substr(colon + 1));
      if (vocabulary.end_of_text) end = vocabulary.tokens[*vocabulary.end_of_text];
      if (!companions.files.contains(kTokenizerJson))
        companions.texts[kTokenizerJson] = gpt2_tokenizer_json(vocabulary);
    } else {
      end = text_of_end(tokenizer);
    }
    companions.texts[kTokenizerConfig] = with_tokenizer_class(json, end);
    companions.files.erase(kTokenizerConfig);
  }
  if (hugging_face_family(config.model) == HuggingFaceFamily::qwen2 &&
      !chosen.starts_with("Qwen2Tokenizer"))
    companions.note = fmt::format(
        "the tokenizer '{}': AutoTokenizer of transformers takes a Qwen2Tokenizer for every qwen2 "
        "model, which may give other ids; PreTrainedTokenizerFast.from_pretrained() gives these",
        name);
}

/// Which tokens of `in` its tokenizer of this form lacks; empty: none. `problem` is why a better
/// form cannot be used.
std::string note_on_added_tokens(const paths::path& in, const TokenizerForm& form,
                                 const Tokenizer& tokenizer, const std::string& problem) {
  const std::string path = in / kAddedTokens;
  if (form.kind == "hf" || !has_file(path)) return "";
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
      "data.tokenizer is {}: '{}': found {} that {} lacks, such as '{}'; texts with them need a "
      "{}{}",
      form.kind, path, counted(static_cast<int64_t>(lacking.size()), "token"), form.needed.front(),
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
      return {form.name_in(kept_in(folder)), note_on_added_tokens(in, form, *tokenizer, problem)};
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
  if (const auto id = end_of_message(config, tokenizer)) ends.insert(*id);
  const auto files = tokenizer_files(config.data.tokenizer);
  const auto found = files.find(kGenerationConfigFile);
  if (found == files.end()) return ends;
  const std::vector<int64_t> listed = listed_ends(parse_file(found->second), found->second);
  ends.insert(listed.begin(), listed.end());
  return ends;
}

Companions find_companions(const Config& config, const std::string& checkpoint) {
  Companions result;
  const std::string& name = config.data.tokenizer;
  try {
    const auto tokenizer = make_tokenizer(name, "data.tokenizer");
    result.files = name == "byte" ? kept_companions(checkpoint) : tokenizer_files(name);
    result.texts[kGenerationConfigFile] = generation_config(config, *tokenizer, result.files);
    result.files.erase(kGenerationConfigFile);
    complete_tokenizer(config, *tokenizer, result);
    if (name != "byte" && !has_tokenizer(result.files))
      result.note = fmt::format(
          "the tokenizer '{}' is left out: it consists of tiktoken's ranks, allowed: vocab.json "
          "and merges.txt, or encoder.json and vocab.bpe",
          name);
  } catch (const Error& error) {
    result = {.files = {},
              .texts = {{kGenerationConfigFile, "{\n  \"_from_model_config\": true\n}\n"}},
              .note = fmt::format("the tokenizer '{}' is left out: {}", name, error.what())};
  }
  return result;
}

}  // namespace lockstep
