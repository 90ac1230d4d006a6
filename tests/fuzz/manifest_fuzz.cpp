// The text of a checkpoint's manifest. The target appends the line with the checksum.

#include <cstdio>
#include <string>

#include "lockstep/checkpoint/manifest.h"
#include "lockstep/core/error.h"
#include "lockstep/datasets/crc32.h"
#include "lockstep/tests/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  std::string text(fuzz::text_of(data, size));
  char line[32] = {};
  std::snprintf(line, sizeof line, "# crc32 %08x\n", crc32(text));
  text += line;
  try {
    const Manifest manifest = parse_manifest(text, "input");
    fuzz::check(parse_manifest(format_manifest(manifest), "again") == manifest,
                "what is written reads back equal");
  } catch (const FileError&) {
  }
  return 0;
}
