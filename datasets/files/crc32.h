#pragma once

#include <cstdint>
#include <string_view>

namespace lockstep {

/// The CRC-32 of zip, gzip and PNG (polynomial 0x04C11DB7, reflected): 0 for no bytes, 0xCBF43926
/// for "123456789". `before` is the checksum of the preceding bytes. Needs no libtorch.
uint32_t crc32(std::string_view bytes, uint32_t before = 0);

}  // namespace lockstep
