// Encodes texts from standard input. Each text is given as its size in 8 bytes, then its bytes. For
// each text it prints the number of ids in 8 bytes, the ids in 8 bytes each, and the decoded text
// in the input's format.
//   encode_texts TOKENIZER [PART]: passes each text in parts of PART bytes: encode_front() is
//   called repeatedly with the remainder and PART more bytes; 0: at once.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

#include "lockstep/datasets/tokenizer.h"

namespace {

using lockstep::Tokenizer;

bool read(std::string& text) {
  uint64_t size = 0;
  if (std::fread(&size, sizeof size, 1, stdin) != 1) return false;
  text.resize(size);
  return std::fread(text.data(), 1, size, stdin) == size;
}

void write(const void* data, uint64_t size, size_t bytes_each) {
  std::fwrite(&size, sizeof size, 1, stdout);
  std::fwrite(data, bytes_each, size, stdout);
}

std::vector<int64_t> encode(Tokenizer& tokenizer, const std::string& text, size_t part) {
  if (part == 0) return tokenizer.encode(text);
  std::vector<int64_t> ids;
  std::string buffer;
  size_t given = 0;
  do {
    buffer += text.substr(given, part);
    given += part;
    buffer.erase(0, tokenizer.encode_front(buffer, given >= text.size(), ids));
  } while (given < text.size());
  return ids;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 2) return 2;
  const auto tokenizer = lockstep::make_tokenizer(argv[1], "tokenizer");
  const size_t part = argc > 2 ? std::strtoul(argv[2], nullptr, 10) : 0;
  for (std::string text; read(text);) {
    const std::vector<int64_t> ids = encode(*tokenizer, text, part);
    write(ids.data(), ids.size(), sizeof(int64_t));
    const std::string decoded = tokenizer->decode(ids);
    write(decoded.data(), decoded.size(), 1);
  }
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "encode_texts: %s\n", error.what());
  return 1;
}
