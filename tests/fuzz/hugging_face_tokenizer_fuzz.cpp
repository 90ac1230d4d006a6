// The input as a whole tokenizer.json, and as a JSON merge patch to a good one.

#include "lockstep/core/error.h"
#include "lockstep/datasets/hugging_face_tokenizer.h"
#include "lockstep/tests/fuzz/fuzz.h"
#include "lockstep/tests/fuzz/hugging_face_sample.h"

namespace lockstep::fuzz {
namespace {

void check_file(const std::string& json) {
  try {
    HuggingFaceTokenizer tokenizer(parse_hugging_face_tokenizer(json, "input"));
    const std::string text = "the  text's 12 <mask> words\n caf\xC3\xA9 e\xCC\x81\xFF</s> the";
    const auto ids = tokenizer.encode(text);
    for (const int64_t id : ids)
      check(id >= 0 && id < tokenizer.vocabulary_size(), "ids are inside the vocabulary");
    tokenizer.decode(ids);
    check(tokenizer.encode(text) == ids, "the same ids again");
    check(tokenizer.clone()->encode(text) == ids, "and from another object");
  } catch (const FileError&) {
  }
}

}  // namespace
}  // namespace lockstep::fuzz

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep::fuzz;
  static const nlohmann::json samples[] = {byte_level_sample(), sentence_sample()};
  const std::string text(text_of(data, size));
  check_file(text);
  const auto patch = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!patch.is_object()) return 0;
  for (nlohmann::json sample : samples) {
    sample.merge_patch(patch);
    check_file(sample.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
  }
  return 0;
}
