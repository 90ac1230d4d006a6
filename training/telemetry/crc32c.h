#pragma once

#include <cstdint>
#include <string_view>

namespace lockstep {

/// CRC-32C (Castagnoli), of few bytes: a table look-up a byte.
uint32_t crc32c(std::string_view bytes);

}  // namespace lockstep
