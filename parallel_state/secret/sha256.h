#pragma once

// Internal. No libtorch here.

#include <array>
#include <cstdint>
#include <string_view>

namespace lockstep {

using Sha256Digest = std::array<uint8_t, 32>;

/// SHA-256 of RFC 6234. It is implemented here because neither libtorch nor another library of the
/// build provides it: another library would enter the wheel as a copy that no distribution update
/// reaches. No step depends on the value of a byte, so the time reveals nothing about the text.
Sha256Digest sha256(std::string_view text);

/// HMAC (RFC 2104) with sha256().
Sha256Digest hmac_sha256(std::string_view key, std::string_view text);

/// Whether both are the same, in a time that does not reveal where they differ. Their lengths are
/// not secret.
bool equal_in_constant_time(std::string_view one, std::string_view other);

}  // namespace lockstep
