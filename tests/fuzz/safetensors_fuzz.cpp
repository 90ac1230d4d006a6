// The start of a safetensors file. The tensors' bytes need not follow.

#include "lockstep/checkpoint/safetensors_header.h"
#include "lockstep/core/error.h"
#include "lockstep/tests/fuzz/fuzz.h"

namespace {

void check_header(std::string_view json, int64_t data_bytes) {
  using namespace lockstep;
  const SafetensorsHeader header = parse_safetensors_header(json, data_bytes, "input");
  int64_t end = 0;
  for (const SafetensorsEntry& entry : header.entries) {
    int64_t bytes = safetensors_element_size(entry.dtype);
    for (const int64_t extent : entry.shape) bytes *= extent;
    fuzz::check(entry.begin == end && entry.end - entry.begin == bytes, "ranges fit their shapes");
    end = entry.end;
  }
  fuzz::check(end == data_bytes, "the ranges fill the file");
  const std::string again = format_safetensors_header(header);
  const SafetensorsHeader read =
      parse_safetensors_header(std::string_view(again).substr(8), data_bytes, "again");
  fuzz::check(read.entries.size() == header.entries.size() && read.metadata == header.metadata,
              "what is written reads back equal");
}

}  // namespace

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  const std::string_view file = fuzz::text_of(data, size);
  try {
    const int64_t length = parse_safetensors_length(file, static_cast<int64_t>(size), "input");
    fuzz::check(length >= 0 && length <= static_cast<int64_t>(size) - 8, "the header is inside");
    const std::string_view json = file.substr(8, static_cast<size_t>(length));
    for (const int64_t data_bytes : {static_cast<int64_t>(size) - 8 - length, int64_t(64)}) {
      try {
        check_header(json, data_bytes);
      } catch (const FileError&) {
      }
    }
  } catch (const FileError&) {
  }
  return 0;
}
