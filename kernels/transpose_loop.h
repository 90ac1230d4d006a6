#pragma once

// Internal.

#include <cstdint>

namespace lockstep::kernels {

/// to[column * to_stride + row] = from[row * from_stride + column], for all of `rows` x `columns`.
void transpose_loop(const float* from, int64_t from_stride, float* to, int64_t to_stride,
                    int64_t rows, int64_t columns);

}  // namespace lockstep::kernels
