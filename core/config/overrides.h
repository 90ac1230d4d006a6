#pragma once

// Internal.

#include <string>
#include <vector>

namespace lockstep {

namespace proto {
class Config;
}

/// Applies assignments "path=value" to `config` in their order; see parse_config() for their form.
/// ConfigError names the assignment.
///
/// In an effective configuration (print_config()), fields that follow others where they are unset
/// have the values of what they follow. If an assignment names what they follow, those that no
/// assignment names follow it again.
void apply_overrides(const std::vector<std::string>& overrides, proto::Config* config);

}  // namespace lockstep
