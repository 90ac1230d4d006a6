#include "lockstep/kernels/transpose_loop.h"

#include <algorithm>
#include <cstring>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace lockstep::kernels {
namespace {

/// A row of a tile is a cache line.
constexpr int64_t kTile = 16;

struct Tile {
  alignas(64) float columns[kTile][kTile];

  void load(const float* from, int64_t stride) {
    for (int64_t row = 0; row < kTile; row += 4)
      for (int64_t column = 0; column < kTile; column += 4)
        load_four(from + row * stride + column, stride, row, column);
  }

  /// A line of the target is written at once: the lines of a target whose stride is a power of two
  /// displace each other from the cache.
  void store(float* to, int64_t stride) const {
    for (int64_t column = 0; column < kTile; ++column)
      std::memcpy(to + column * stride, columns[column], sizeof columns[column]);
  }

 private:
  void load_four(const float* from, int64_t stride, int64_t row, int64_t column) {
#if defined(__SSE__)
    __m128 a = _mm_loadu_ps(from), b = _mm_loadu_ps(from + stride);
    __m128 c = _mm_loadu_ps(from + 2 * stride), d = _mm_loadu_ps(from + 3 * stride);
    _MM_TRANSPOSE4_PS(a, b, c, d);
    _mm_store_ps(&columns[column][row], a);
    _mm_store_ps(&columns[column + 1][row], b);
    _mm_store_ps(&columns[column + 2][row], c);
    _mm_store_ps(&columns[column + 3][row], d);
#else
    for (int64_t i = 0; i < 4; ++i)
      for (int64_t j = 0; j < 4; ++j) columns[column + j][row + i] = from[i * stride + j];
#endif
  }
};

}  // namespace

void transpose_loop(const float* from, int64_t from_stride, float* to, int64_t to_stride,
                    int64_t rows, int64_t columns) {
  Tile tile;
  for (int64_t column = 0; column < columns; column += kTile)
    for (int64_t row = 0; row < rows; row += kTile) {
      const float* const source = from + row * from_stride + column;
      float* const target = to + column * to_stride + row;
      if (row + kTile <= rows && column + kTile <= columns) {
        tile.load(source, from_stride);
        tile.store(target, to_stride);
        continue;
      }
      for (int64_t i = 0; i < std::min(kTile, rows - row); ++i)
        for (int64_t j = 0; j < std::min(kTile, columns - column); ++j)
          target[j * to_stride + i] = source[i * from_stride + j];
    }
}

}  // namespace lockstep::kernels
