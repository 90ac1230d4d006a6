#pragma once

// Internal. No libtorch here.

#include <cstdint>

namespace lockstep {

constexpr int kTagBits = 28;  ///< of a message's tag; the next bit marks those of HostExchange

/// A hash, `bits` bits long, of a message of a call.
uint64_t mixed_tag(uint64_t identity, uint64_t bytes, int bits);

/// A tag for a message of `bytes` bytes between two ranks outside HostExchange.
int message_tag(uint64_t identity, int64_t bytes);

}  // namespace lockstep
