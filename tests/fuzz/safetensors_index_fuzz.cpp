// A model.safetensors.index.json.

#include "lockstep/checkpoint/safetensors_index.h"
#include "lockstep/core/error.h"
#include "lockstep/tests/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  WeightMap files;
  try {
    files = parse_safetensors_index(fuzz::text_of(data, size), "input");
  } catch (const FileError&) {
    return 0;
  }
  for (const auto& [tensor, file] : files)
    fuzz::check(!file.empty() && file != ".." && file.find('/') == std::string::npos,
                "files are in the folder");
  const WeightMap again = parse_safetensors_index(format_safetensors_index(files, 1), "again");
  fuzz::check(again == files, "what is written reads back equal");
  return 0;
}
