#include "lockstep/checkpoint/finite_values.h"

#include <fmt/format.h>

#include <cstring>

namespace lockstep {
namespace {

/// A value is finite unless all bits of its exponent are set.
template <class Bits>
int64_t count_exponents(const void* data, int64_t bytes, Bits exponent) {
  const auto* const from = static_cast<const char*>(data);
  int64_t count = 0;
  for (int64_t at = 0; at < bytes; at += int64_t{sizeof(Bits)}) {
    Bits value = 0;
    std::memcpy(&value, from + at, sizeof value);
    count += (value & exponent) == exponent ? 1 : 0;
  }
  return count;
}

}  // namespace

int64_t count_not_finite(std::string_view dtype, const void* data, int64_t bytes) {
  if (dtype == "F64") return count_exponents<uint64_t>(data, bytes, 0x7ff0'0000'0000'0000);
  if (dtype == "F32") return count_exponents<uint32_t>(data, bytes, 0x7f80'0000);
  if (dtype == "BF16") return count_exponents<uint16_t>(data, bytes, 0x7f80);
  if (dtype == "F16") return count_exponents<uint16_t>(data, bytes, 0x7c00);
  return 0;
}

bool must_be_finite(std::string_view state) { return state.empty() || state == "master"; }

std::string describe_not_finite(std::string_view tensor, int64_t count, int64_t elements) {
  return fmt::format("tensor '{}': found {} of {} elements that are not finite, allowed: none",
                     tensor, count, elements);
}

}  // namespace lockstep
