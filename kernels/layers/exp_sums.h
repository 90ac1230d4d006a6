#pragma once

// Internal: what the softmax of a row needs. No libtorch here, see adamw_loop.h.

#include <limits>

#include "lockstep/kernels/float_storage.h"

namespace lockstep::kernels {

/// For numbers x: the highest, the sum of e^(x - highest), and the sum of x itself.
template <class T>
struct ExpSums {
  static constexpr T kLowest = -std::numeric_limits<T>::infinity();

  T highest = kLowest;
  T exponentials = 0;
  T plain = 0;
};

/// e^(x - highest); 0 if it is too small for a normal number. NaN if both are the same infinity.
template <class Block, class T>
LOCKSTEP_LANE T exp_below(T x, T highest) {
  constexpr T kLeast = sizeof(T) == 8 ? T(-708) : T(-87);
  const T below = x - highest;
  return below < kLeast ? T(0) : Block::exp_normal(below);
}

}  // namespace lockstep::kernels
