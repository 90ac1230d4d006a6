// A launcher's variables as NAME=VALUE, one per line.

#include <map>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/parallel_state/launch_environment.h"
#include "lockstep/tests/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  std::map<std::string, std::string, std::less<>> variables;
  for (std::string_view left = fuzz::text_of(data, size); !left.empty();) {
    const std::string_view line = left.substr(0, left.find('\n'));
    left.remove_prefix(std::min(line.size() + 1, left.size()));
    const size_t equals = std::min(line.find('='), line.size());
    variables[std::string(line.substr(0, equals))] = line.substr(std::min(equals + 1, line.size()));
  }
  try {
    const LaunchEnvironment environment =
        read_launch_environment([&](const char* name) -> std::optional<std::string> {
          const auto found = variables.find(name);
          if (found == variables.end()) return std::nullopt;
          return found->second;
        });
    fuzz::check(environment.rank >= 0 && environment.rank < environment.world_size, "rank");
    fuzz::check(environment.local_rank >= 0 && environment.local_rank < environment.world_size,
                "local rank");
    fuzz::check(environment.master_port >= 0 && environment.master_port <= 65535, "port");
    environment.single_host();
    environment.store_address();
  } catch (const ConfigError&) {
  }
  return 0;
}
