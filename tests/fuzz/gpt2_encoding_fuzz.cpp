// Encodes arbitrary bytes as a text, at once and in parts.

#include "lockstep/tests/fuzz/fuzz.h"
#include "lockstep/tests/fuzz/tokenizer_check.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  static Gpt2Tokenizer tokenizer(parse_tiktoken_ranks(
      fuzz::ranks_of_bytes() + "IHQ= 256\naGU= 257\nIHRoZQ== 258\naW4= 259\nMTI= 260\n4pg= 261\n",
      "ranks"));
  const std::string text(fuzz::text_of(data, size));
  const auto ids = tokenizer.encode(text);
  fuzz::check(tokenizer.decode(ids) == text, "the text comes back");
  std::vector<int64_t> parts;
  std::string buffer;
  for (size_t place = 0; place < size;) {
    const size_t more = std::min<size_t>(data[place] % 16 + 1, size - place);
    buffer += text.substr(place, more);
    place += more;
    buffer.erase(0, tokenizer.encode_front(buffer, place == size, parts));
  }
  fuzz::check(parts == ids, "the parts give the whole");
  return 0;
}
