#include "lockstep/datasets/sentencepiece_tokenizer.h"

#include <dlfcn.h>

#include <filesystem>

#include "lockstep/core/check.h"
#include "lockstep/datasets/file_bytes.h"
#include "lockstep/datasets/sentencepiece_functions.h"

namespace lockstep {
namespace {

constexpr char kLibrary[] = "liblockstep_sentencepiece.so";

#ifdef __SANITIZE_ADDRESS__
constexpr int kOwnSymbols = 0;  // the sanitizer refuses RTLD_DEEPBIND
#else
constexpr int kOwnSymbols = RTLD_DEEPBIND;
#endif

/// The folder of the program or library that this code is part of.
std::filesystem::path own_folder() {
  Dl_info info = {};
  if (::dladdr(reinterpret_cast<const void*>(&has_sentencepiece), &info) == 0) return {};
  std::error_code error;
  const auto own = std::filesystem::canonical(info.dli_fname, error);
  return error ? std::filesystem::path() : own.parent_path();
}

/// Loads the library that lies next to those of this build or installation; nullptr if there is
/// none.
const SentencepieceFunctions* load() {
  const std::filesystem::path folder = own_folder();
  for (const char* place : {"", "lib", "../lib", "../" LOCKSTEP_LIBDIR}) {
    const std::string path = folder / place / kLibrary;
    void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | kOwnSymbols);
    if (library == nullptr) continue;
    const auto entry = reinterpret_cast<SentencepieceEntry>(::dlsym(library, kSentencepieceSymbol));
    if (entry != nullptr) return entry();
  }
  return nullptr;
}

const SentencepieceFunctions* loaded() {
  static const SentencepieceFunctions* const functions = load();
  return functions;
}

const SentencepieceFunctions& loaded_functions(const std::string& field) {
  require<ConfigError>(has_sentencepiece(),
                       "{}: found sentencepiece, but this build has no SentencePiece; allowed: "
                       "another tokenizer, or a build on a machine with libsentencepiece-dev",
                       field);
  return *loaded();
}

void append_to_string(void* sink, const char* bytes, size_t size) {
  static_cast<std::string*>(sink)->append(bytes, size);
}

}  // namespace

bool has_sentencepiece() { return loaded() != nullptr; }

SentencepieceTokenizer::SentencepieceTokenizer(const std::string& path, const std::string& field)
    : path_(path), functions_(loaded_functions(field)) {
  const FileBytes file(path);
  if (void* const model = functions_.open(file.bytes().data(), file.bytes().size()))
    model_.reset(model, functions_.close);
  require<FileError>(model_ != nullptr && vocabulary_size() > 0,
                     "'{}' is not a SentencePiece model", path);
}

std::unique_ptr<Tokenizer> SentencepieceTokenizer::clone() const {
  return std::make_unique<SentencepieceTokenizer>(*this);
}

int64_t SentencepieceTokenizer::vocabulary_size() const {
  return functions_.vocabulary_size(model_.get());
}

int64_t SentencepieceTokenizer::end_of_document() const {
  const int64_t id = functions_.end_of_sentence(model_.get());
  require<FileError>(id >= 0, "'{}': found no end-of-sentence token, which ends documents", path_);
  return id;
}

int64_t SentencepieceTokenizer::begin_of_text() const {
  const int64_t id = functions_.begin_of_sentence(model_.get());
  return id >= 0 ? id : end_of_document();
}

size_t SentencepieceTokenizer::encode_front(std::string_view text, bool last,
                                            std::vector<int64_t>& ids) {
  if (!last) return 0;
  const bool done = functions_.encode(
      model_.get(), text.data(), text.size(), &ids,
      [](void* sink, int64_t id) { static_cast<std::vector<int64_t>*>(sink)->push_back(id); });
  require<UsageError>(done, "'{}': a text of {} bytes cannot be encoded", path_, text.size());
  return text.size();
}

void SentencepieceTokenizer::check_ids(const std::vector<int64_t>& ids) const {
  for (const int64_t id : ids)
    require<UsageError>(id >= 0 && id < vocabulary_size(),
                        "SentencepieceTokenizer: token id: found {}, allowed: 0 to {}", id,
                        vocabulary_size() - 1);
}

std::string SentencepieceTokenizer::decode(const std::vector<int64_t>& ids) const {
  check_ids(ids);
  std::string text;
  const bool done =
      functions_.decode(model_.get(), ids.data(), ids.size(), &text, append_to_string);
  require<UsageError>(done, "'{}': {} ids cannot be decoded", path_, ids.size());
  return text;
}

std::string SentencepieceTokenizer::decode_more(const std::vector<int64_t>& ids) const {
  check_ids(ids);
  std::string text;
  for (const int64_t id : ids) {
    const bool done = functions_.decode_inside(model_.get(), id, &text, append_to_string);
    require<UsageError>(done, "'{}': id {} cannot be decoded", path_, id);
  }
  return text;
}

}  // namespace lockstep
