#pragma once

// Internal. No libtorch here.

#include <cstdint>
#include <string>

namespace lockstep {

/// "rank 1: no text"; the message alone if it begins with that rank, as in "rank 1 cannot ...".
inline std::string told_by_rank(int64_t rank, const std::string& message) {
  const std::string begin = "rank " + std::to_string(rank);
  const bool told = message.starts_with(begin + " ") || message.starts_with(begin + ":");
  return told ? message : begin + ": " + message;
}

}  // namespace lockstep
