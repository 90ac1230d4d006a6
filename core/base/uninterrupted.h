#pragma once

#include <cerrno>

namespace lockstep {

/// Repeats a system call, which returns a negative number if it fails, until no signal interrupts
/// it. Not for close(): an interrupted one has closed the descriptor.
template <class Call>
auto uninterrupted(Call call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

}  // namespace lockstep
