#pragma once

// Internal.

#include <cstdint>
#include <string_view>

namespace lockstep {

/// 64-bit FNV-1a, for numbers that all ranks derive in the same way. No protection against somebody
/// who looks for collisions.
inline constexpr uint64_t kDigestStart = 14695981039346656037U;

/// The digest `so_far` continued by one value: a byte, or a whole number at once.
constexpr uint64_t digest_with(uint64_t so_far, uint64_t value) {
  return (so_far ^ value) * 1099511628211U;
}

/// The digest of a text, byte by byte. `so_far` continues that of an earlier text.
constexpr uint64_t text_digest(std::string_view text, uint64_t so_far = kDigestStart) {
  for (const char c : text) so_far = digest_with(so_far, static_cast<unsigned char>(c));
  return so_far;
}

}  // namespace lockstep
