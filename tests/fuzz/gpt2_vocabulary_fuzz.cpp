// encoder.json, a NUL and vocab.bpe.

#include "lockstep/core/error.h"
#include "lockstep/tests/fuzz/fuzz.h"
#include "lockstep/tests/fuzz/tokenizer_check.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  const std::string_view both = fuzz::text_of(data, size);
  const size_t end = std::min(both.find('\0'), both.size());
  try {
    fuzz::check_tokenizer(parse_gpt2_vocabulary(both.substr(0, end), "encoder",
                                                both.substr(std::min(end + 1, size)), "merges"));
  } catch (const FileError&) {
  }
  return 0;
}
