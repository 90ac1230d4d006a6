#include "lockstep/training/data/tokenizer.h"

#include "lockstep/core/check.h"

namespace lockstep {

std::vector<int64_t> ByteTokenizer::encode(std::string_view text) {
  std::vector<int64_t> ids;
  ids.reserve(text.size());
  for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
  return ids;
}

std::string ByteTokenizer::decode(const std::vector<int64_t>& ids) {
  std::string text;
  text.reserve(ids.size());
  for (const int64_t id : ids) {
    require<UsageError>(id >= 0 && id < kVocabularySize,
                        "ByteTokenizer: token id: found {}, allowed: 0 to {}", id,
                        kVocabularySize - 1);
    text.push_back(static_cast<char>(id));
  }
  return text;
}

}  // namespace lockstep
