#include "lockstep/parallel_state/secret.h"

#include <sys/random.h>

#include <cerrno>
#include <cstring>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/sha256.h"

namespace lockstep {

std::string Secret::sign(std::string_view label, std::string_view text) const {
  std::string signed_text(label);
  signed_text += '\0';
  signed_text += text;
  const Sha256Digest digest = hmac_sha256(text_, signed_text);
  return {digest.begin(), digest.end()};
}

std::string random_bytes(size_t bytes) {
  std::string random(bytes, '\0');
  for (size_t at = 0; at < bytes;) {
    const ssize_t now = ::getrandom(random.data() + at, bytes - at, 0);
    require<UsageError>(now > 0 || errno == EINTR, "the system provides no random numbers: {}",
                        std::strerror(errno));
    at += static_cast<size_t>(std::max<ssize_t>(now, 0));
  }
  return random;
}

std::string in_hex(std::string_view bytes) {
  std::string hex;
  for (const char byte : bytes) hex += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  return hex;
}

}  // namespace lockstep
