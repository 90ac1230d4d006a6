#pragma once

#include <cstdint>
#include <string>

#include "lockstep/core/error.h"

/// Exact integer arithmetic for sizes and offsets. All functions take non-negative values.
namespace lockstep {

/// The smallest integer that is at least numerator / denominator. `denominator` > 0.
constexpr int64_t ceil_div(int64_t numerator, int64_t denominator) {
  return numerator / denominator + (numerator % denominator != 0 ? 1 : 0);
}

/// The smallest multiple of `multiple` (> 0) that is at least `value`.
constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return ceil_div(value, multiple) * multiple;
}

/// numerator / denominator, which must be exact. Throws ConfigError with both numbers, under the
/// names that the caller gives ("hidden_size", "num_attention_heads").
inline int64_t div_exact(int64_t numerator, int64_t denominator, const std::string& numerator_name,
                         const std::string& denominator_name) {
  if (denominator <= 0 || numerator % denominator != 0)
    throw ConfigError(numerator_name + " (" + std::to_string(numerator) +
                      ") must be divisible by " + denominator_name + " (" +
                      std::to_string(denominator) + ")");
  return numerator / denominator;
}

/// a + b, or UsageError with `what` if the sum does not fit into 64 bits.
inline int64_t checked_add(int64_t a, int64_t b, const std::string& what) {
  int64_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum))
    throw UsageError(what + ": " + std::to_string(a) + " + " + std::to_string(b) +
                     " does not fit into 64 bits");
  return sum;
}

/// a * b, or UsageError with `what` if the product does not fit into 64 bits.
inline int64_t checked_mul(int64_t a, int64_t b, const std::string& what) {
  int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product))
    throw UsageError(what + ": " + std::to_string(a) + " * " + std::to_string(b) +
                     " does not fit into 64 bits");
  return product;
}

/// round_up(), or UsageError with `what` if the result does not fit into 64 bits.
inline int64_t checked_round_up(int64_t value, int64_t multiple, const std::string& what) {
  return checked_mul(ceil_div(value, multiple), multiple, what);
}

}  // namespace lockstep
