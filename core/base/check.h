#pragma once

// Internal: not installed, because fmt stays out of the public headers.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>

#include "lockstep/core/error.h"

namespace lockstep {

/// Throws ErrorType with a formatted message.
template <class ErrorType, class... Args>
[[noreturn]] void fail(fmt::format_string<Args...> message, Args&&... args) {
  throw ErrorType(fmt::format(message, std::forward<Args>(args)...));
}

/// Throws ErrorType with a formatted message unless `condition` holds. The arguments are formatted
/// only on failure, but they are evaluated always: keep them cheap.
template <class ErrorType, class... Args>
void require(bool condition, fmt::format_string<Args...> message, Args&&... args) {
  if (!condition) [[unlikely]]
    fail<ErrorType>(message, std::forward<Args>(args)...);
}

}  // namespace lockstep
