#include "lockstep/datasets/tokenizer.h"

#include "lockstep/core/check.h"
#include "lockstep/datasets/gpt2_tokenizer.h"
#include "lockstep/datasets/hugging_face_tokenizer.h"
#include "lockstep/datasets/sentencepiece_tokenizer.h"

namespace lockstep {
namespace {

constexpr std::string_view kGpt2 = "gpt2:";
constexpr std::string_view kHuggingFace = "hf:";
constexpr std::string_view kSentencepiece = "sentencepiece:";

}  // namespace

std::vector<int64_t> Tokenizer::encode(std::string_view text) {
  restart();
  std::vector<int64_t> ids;
  encode_front(text, /*last=*/true, ids);
  return ids;
}

size_t ByteTokenizer::encode_front(std::string_view text, bool /*last*/,
                                   std::vector<int64_t>& ids) {
  ids.reserve(ids.size() + text.size());
  for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
  return text.size();
}

std::string ByteTokenizer::decode(const std::vector<int64_t>& ids) const {
  std::string text;
  text.reserve(ids.size());
  for (const int64_t id : ids) {
    require<UsageError>(id >= 0 && id <= end_of_document(),
                        "ByteTokenizer: token id: found {}, allowed: 0 to {}", id,
                        end_of_document());
    if (id != end_of_document()) text.push_back(static_cast<char>(id));
  }
  return text;
}

std::unique_ptr<Tokenizer> ByteTokenizer::clone() const {
  return std::make_unique<ByteTokenizer>();
}

void check_tokenizer_name(const std::string& name, const std::string& field) {
  const auto with_path = [&](std::string_view kind) {
    return name.starts_with(kind) && name.size() > kind.size();
  };
  const bool known =
      name == "byte" || with_path(kGpt2) || with_path(kHuggingFace) || with_path(kSentencepiece);
  require<ConfigError>(known,
                       "{}: found '{}', allowed: byte, gpt2:FOLDER, hf:FILE, sentencepiece:FILE",
                       field, name);
}

std::unique_ptr<Tokenizer> make_tokenizer(const std::string& name, const std::string& field) {
  check_tokenizer_name(name, field);
  if (name == "byte") return std::make_unique<ByteTokenizer>();
  if (name.starts_with(kSentencepiece))
    return std::make_unique<SentencepieceTokenizer>(name.substr(kSentencepiece.size()), field);
  if (name.starts_with(kHuggingFace))
    return std::make_unique<HuggingFaceTokenizer>(name.substr(kHuggingFace.size()));
  return std::make_unique<Gpt2Tokenizer>(name.substr(kGpt2.size()));
}

}  // namespace lockstep
