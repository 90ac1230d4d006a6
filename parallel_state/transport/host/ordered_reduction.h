#pragma once

// Internal: the arithmetic of reductions on the host. No libtorch here: next to its headers such
// loops, once inlined, lose their vectorization.

#include <cstdint>

namespace lockstep {

/// Element types of host reductions.
enum class HostType { f32, f64, bf16, f16, i8, i16, i32, i64, u8 };

enum class HostReduceOp { sum, max, min };

/// How the terms of the ranks are combined: each term x becomes x * multiplier / divisor first, and
/// the result is divided by `result_divisor`. All three must be 1 for integers.
struct HostReduction {
  HostReduceOp op = HostReduceOp::sum;
  double multiplier = 1;
  double divisor = 1;
  double result_divisor = 1;
};

/// out[i] = terms[0][i] op terms[1][i] op ... for i < n, from left to right, so that the bits
/// depend only on the order of the ranks. bf16 and f16 are combined in fp32 and rounded once.
/// Products and quotients are rounded before they are added: f32 and f64 results have the same bits
/// as if every term were scaled beforehand. `out` may be one of the terms. `count` >= 1.
void reduce_in_order(HostType type, const HostReduction& reduction, void* out,
                     const void* const* terms, int64_t count, int64_t n);

}  // namespace lockstep
