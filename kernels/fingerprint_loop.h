#pragma once

// Internal: the CPU loop, without libtorch; see adamw_loop.h.

#include <cstdint>

namespace lockstep::kernels {

/// The sum over `bytes` bytes whose first word is number `first`.
uint64_t fingerprint_loop(const unsigned char* memory, int64_t bytes, int64_t first);

}  // namespace lockstep::kernels
