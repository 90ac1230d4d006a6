// A Hugging Face config.json.

#include "lockstep/checkpoint/hugging_face_config.h"
#include "lockstep/core/error.h"
#include "lockstep/tests/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  try {
    parse_hugging_face_config(fuzz::text_of(data, size), "input");
  } catch (const FileError&) {
  } catch (const ConfigError&) {
  }
  return 0;
}
