#include "lockstep/kernels/sum_of_squares_loop.h"

#include <bit>

#include "lockstep/core/vector_clones.h"

namespace lockstep::kernels {
namespace {

constexpr int kLanes = 16;

inline double value(float x) { return x; }
inline double value(double x) { return x; }
inline double value(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

/// Element i goes to lane i mod kLanes; the lanes are added pairwise at the end.
template <class T>
inline __attribute__((always_inline)) double run(const T* __restrict x, int64_t n) {
  double lanes[kLanes] = {};
  const int64_t whole = n - n % kLanes;
  for (int64_t i = 0; i < whole; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) {
      const double element = value(x[i + lane]);
      lanes[lane] += element * element;
    }
  for (int64_t i = whole; i < n; ++i) {
    const double element = value(x[i]);
    lanes[i - whole] += element * element;
  }
  for (int step = kLanes / 2; step > 0; step /= 2)
    for (int lane = 0; lane < step; ++lane) lanes[lane] += lanes[lane + step];
  return lanes[0];
}

}  // namespace

LOCKSTEP_VECTOR_CLONES
double sum_of_squares_loop(const float* x, int64_t n) { return run(x, n); }

LOCKSTEP_VECTOR_CLONES
double sum_of_squares_loop(const double* x, int64_t n) { return run(x, n); }

LOCKSTEP_VECTOR_CLONES
double sum_of_squares_loop(const uint16_t* x, int64_t n) { return run(x, n); }

}  // namespace lockstep::kernels
