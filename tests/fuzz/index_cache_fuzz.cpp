// The cache of sample indices. The target appends the checksum.

#include <string>

#include "lockstep/core/error.h"
#include "lockstep/datasets/crc32.h"
#include "lockstep/datasets/index_cache.h"
#include "lockstep/tests/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  std::string bytes(fuzz::text_of(data, size));
  const uint32_t checksum = crc32(bytes);
  bytes.append(reinterpret_cast<const char*>(&checksum), sizeof checksum);
  try {
    const SampleIndexView view = parse_index_cache(bytes, "input");
    SampleIndex index;
    for (int64_t i = 0; i < view.documents.size(); ++i)
      index.documents.push_back(view.documents[i]);
    for (int64_t i = 0; i < view.starts.size(); ++i) index.starts.push_back(view.starts[i]);
    for (int64_t i = 0; i < view.order.size(); ++i) index.order.push_back(view.order[i]);
    std::string written;
    write_index_cache(index, view.description, [&](std::string_view part) { written += part; });
    fuzz::check(written == bytes, "what was read is written again");
  } catch (const FileError&) {
  }
  return 0;
}
