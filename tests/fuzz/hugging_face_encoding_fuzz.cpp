// Encodes arbitrary bytes as a text with tokenizers of both kinds, at once and in parts.

#include "lockstep/datasets/hugging_face_tokenizer.h"
#include "lockstep/tests/fuzz/fuzz.h"
#include "lockstep/tests/fuzz/hugging_face_sample.h"

namespace lockstep::fuzz {
namespace {

void check_parts(HuggingFaceTokenizer& tokenizer, const uint8_t* data, size_t size) {
  const std::string text(text_of(data, size));
  const auto ids = tokenizer.encode(text);
  for (const int64_t id : ids)
    check(id >= 0 && id < tokenizer.vocabulary_size(), "ids are inside the vocabulary");
  tokenizer.decode(ids);
  std::vector<int64_t> parts;
  std::string buffer;
  for (size_t place = 0; place < size;) {
    const size_t more = std::min<size_t>(data[place] % 16 + 1, size - place);
    buffer += text.substr(place, more);
    place += more;
    buffer.erase(0, tokenizer.encode_front(buffer, place == size, parts));
  }
  check(parts == ids, "the parts give the whole");
}

HuggingFaceTokenizer tokenizer_of(const nlohmann::json& json) {
  return HuggingFaceTokenizer(parse_hugging_face_tokenizer(json.dump(), "sample"));
}

}  // namespace
}  // namespace lockstep::fuzz

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep::fuzz;
  static auto bytes = tokenizer_of(byte_level_sample());
  static auto sentences = tokenizer_of(sentence_sample());
  check_parts(bytes, data, size);
  check_parts(sentences, data, size);
  return 0;
}
