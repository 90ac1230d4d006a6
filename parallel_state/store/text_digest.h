#pragma once

// Internal.

#include <cstdint>
#include <string_view>

namespace lockstep {

/// A number that all ranks derive alike from a text: 64-bit FNV-1a. `so_far` continues the digest
/// of an earlier text. No protection against somebody who looks for collisions.
constexpr uint64_t text_digest(std::string_view text, uint64_t so_far = 14695981039346656037U) {
  for (const char c : text) so_far = (so_far ^ static_cast<unsigned char>(c)) * 1099511628211U;
  return so_far;
}

}  // namespace lockstep
