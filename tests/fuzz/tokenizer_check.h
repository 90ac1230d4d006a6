#pragma once

#include <string>
#include <utility>

#include "lockstep/datasets/gpt2_tokenizer.h"
#include "lockstep/tests/fuzz/fuzz.h"

namespace lockstep::fuzz {

/// Checks that the tokenizer of any vocabulary decodes to the original text.
inline void check_tokenizer(Gpt2Vocabulary vocabulary) {
  Gpt2Tokenizer tokenizer(std::move(vocabulary));
  const std::string text =
      "the text's 12 words, \xE6\x9D\xB1\xE4\xBA\xAC \xFF\xF0\x9F ...  \n the the";
  const auto ids = tokenizer.encode(text);
  for (const int64_t id : ids)
    check(id >= 0 && id < tokenizer.vocabulary_size(), "ids are inside the vocabulary");
  check(tokenizer.decode(ids) == text, "the text comes back");
  check(tokenizer.encode(text) == ids, "the same ids again");
}

/// The lines for the 256 bytes, with the ids 0 to 255.
inline std::string ranks_of_bytes() {
  constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string lines;
  for (unsigned byte = 0; byte < 256; ++byte) {
    lines += kDigits[byte >> 2];
    lines += kDigits[byte << 4 & 63];
    lines += "== " + std::to_string(byte) + "\n";
  }
  return lines;
}

}  // namespace lockstep::fuzz
