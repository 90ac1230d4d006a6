// gzip and zstd, in pieces of two sizes. Reads up to a mebibyte of the contents.

#include <algorithm>
#include <string>

#include "lockstep/datasets/compressed_input.h"
#include "lockstep/tests/fuzz/fuzz.h"

namespace {

struct Read {
  std::string text, problem;
};

Read read_by(std::string_view bytes, lockstep::Compression compression, size_t at_once) {
  constexpr size_t kMost = 1 << 20;
  const auto source = [&](char* to, size_t count) {
    const size_t now = std::min({count, at_once, bytes.size()});
    bytes.copy(to, now);
    bytes.remove_prefix(now);
    return now;
  };
  lockstep::CompressedInput input(compression, source, "input");
  Read read;
  std::string part(at_once, '\0');
  try {
    while (read.text.size() < kMost) {
      const size_t got = input.read(part.data(), std::min(at_once, kMost - read.text.size()));
      if (got == 0) break;
      read.text.append(part, 0, got);
    }
  } catch (const lockstep::CompressionError& error) {
    read.problem = error.what();
  }
  return read;
}

}  // namespace

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  const std::string_view bytes = fuzz::text_of(data, size);
  for (const Compression compression : {Compression::gzip, Compression::zstd}) {
    const Read small = read_by(bytes, compression, 61),
               large = read_by(bytes, compression, 1 << 16);
    const bool sound = small.problem.empty() && large.problem.empty();
    if (sound || compression == Compression::gzip) {
      fuzz::check(small.problem.empty() == large.problem.empty(), "all pieces succeed alike");
      fuzz::check(small.text == large.text, "and give the same text");
      continue;
    }
    // zstd discards the output of the call that finds damage, and accepts a frame that it has
    // completely, whatever its window.
    fuzz::check(small.text.starts_with(large.text) || large.text.starts_with(small.text),
                "the text in front of a damage is the same");
  }
  return 0;
}
