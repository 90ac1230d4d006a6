#pragma once

// Internal.

#include <utility>

#include "lockstep/core/error.h"

namespace lockstep {

/// Calls `check`, which computes with sizes of a configuration. A UsageError, such as for a size
/// that does not fit into 64 bits, becomes a ConfigError with the same message.
template <class Check>
void refuse_unusable_sizes(Check&& check) {
  try {
    std::forward<Check>(check)();
  } catch (const UsageError& error) {
    throw ConfigError(error.what());
  }
}

}  // namespace lockstep
