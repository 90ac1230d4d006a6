#pragma once

// Internal.

namespace lockstep {

/// ConfigError if a launcher started this process as one of several, each of which would do all
/// the work of `command` and print its result.
void require_one_process(const char* command);

}  // namespace lockstep
