#pragma once

// Internal. No libtorch here.

#include <string>
#include <string_view>

namespace lockstep {

/// What all ranks of a job know and nobody else. Nothing returns or prints it.
class Secret {
 public:
  static constexpr size_t kLeastBytes = 16;

  explicit Secret(std::string text) : text_(std::move(text)) {}

  /// 32 bytes that only those can work out who know the secret. `label` says what they are for, so
  /// that none serves for two ends.
  std::string sign(std::string_view label, std::string_view text) const;

 private:
  std::string text_;
};

/// So many bytes of the system's random numbers, which nobody can guess.
std::string random_bytes(size_t bytes);

/// "0a1b"
std::string in_hex(std::string_view bytes);

}  // namespace lockstep
