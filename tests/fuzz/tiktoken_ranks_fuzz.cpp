// tiktoken's rank file. The lines of the 256 bytes may be missing.

#include <string>

#include "lockstep/core/error.h"
#include "lockstep/tests/fuzz/fuzz.h"
#include "lockstep/tests/fuzz/tokenizer_check.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  static const std::string bytes = fuzz::ranks_of_bytes();
  for (const std::string& front : {std::string(), bytes}) {
    try {
      fuzz::check_tokenizer(
          parse_tiktoken_ranks(front + std::string(fuzz::text_of(data, size)), "input"));
    } catch (const FileError&) {
    }
  }
  return 0;
}
