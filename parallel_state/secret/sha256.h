#pragma once

// Internal. No libtorch here.

#include <array>
#include <cstdint>
#include <string_view>

namespace lockstep {

using Sha256Digest = std::array<uint8_t, 32>;

/// SHA-256 of RFC 6234. Written out, because neither libtorch nor another library of the build has
/// it: a further library would come into the wheel as a copy that no update of a distribution
/// reaches. No step depends on the value of a byte, so the time tells nothing of the text.
Sha256Digest sha256(std::string_view text);

/// HMAC (RFC 2104) with that.
Sha256Digest hmac_sha256(std::string_view key, std::string_view text);

/// Whether both are the same, in a time that does not tell where they differ. Their lengths are no
/// secret.
bool equal_in_constant_time(std::string_view one, std::string_view other);

}  // namespace lockstep
