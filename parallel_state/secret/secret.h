#pragma once

// Internal. No libtorch here.

#include <string>
#include <string_view>

namespace lockstep {

/// A secret that only the ranks of a job know. Nothing returns or prints it.
class Secret {
 public:
  static constexpr size_t kLeastBytes = 16;

  explicit Secret(std::string text) : text_(std::move(text)) {}

  /// 32 bytes that only someone who knows the secret can compute. `label` says what they are for,
  /// so that a signature made for one purpose is useless for another.
  std::string sign(std::string_view label, std::string_view text) const;

 private:
  std::string text_;
};

/// `bytes` random bytes from the system, which nobody can guess.
std::string random_bytes(size_t bytes);

/// "0a1b"
std::string in_hex(std::string_view bytes);

}  // namespace lockstep
