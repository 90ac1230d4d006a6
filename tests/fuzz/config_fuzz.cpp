// The configuration's text and, after the first NUL, its overrides, one per line.

#include <string>
#include <vector>

#include "lockstep/core/config_io.h"
#include "lockstep/core/error.h"
#include "lockstep/tests/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  std::string_view text = fuzz::text_of(data, size);
  std::vector<std::string> overrides;
  const size_t end = std::min(text.find('\0'), text.size());
  for (std::string_view left = text.substr(std::min(end + 1, text.size())); !left.empty();) {
    overrides.emplace_back(left.substr(0, left.find('\n')));
    left.remove_prefix(std::min(overrides.back().size() + 1, left.size()));
  }
  try {
    const Config config = parse_config(text.substr(0, end), "input", overrides);
    const Config again = parse_config(print_config(config), "printed");
    fuzz::check(config_values(config) == config_values(again), "what is printed reads back equal");
  } catch (const ConfigError&) {
  } catch (const UsageError&) {
  }
  return 0;
}
