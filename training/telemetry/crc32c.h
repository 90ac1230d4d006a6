#pragma once

#include <cstdint>
#include <string_view>

namespace lockstep {

/// CRC-32C (Castagnoli), for few bytes: one table look-up per byte.
uint32_t crc32c(std::string_view bytes);

}  // namespace lockstep
