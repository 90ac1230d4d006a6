#pragma once

// Internal: CUDA threads that run a body, see vector_block.h.

#include <cstdint>

#include "lockstep/kernels/float_storage.h"

namespace lockstep::kernels {

/// The threads along x of a block go over a row in turns.
struct ThreadLanes {
  /// Calls f(i) for i = 0 ... n - 1; a thread gets the same i in each call with the same n.
  template <class F>
  LOCKSTEP_LANE static void each(int64_t n, F f) {
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) f(i);
  }
  LOCKSTEP_LANE static bool leads() { return threadIdx.x == 0; }
  LOCKSTEP_LANE static float exp(float x) { return expf(x); }
  LOCKSTEP_LANE static double exp(double x) { return ::exp(x); }
};

/// All threads of a block, up to 1024, in whole warps along x.
struct ThreadBlock : ThreadLanes {
  /// The sum of term(i), in an order that depends on n and the number of threads alone; each thread
  /// gets it. All threads call it.
  template <class T, class F>
  LOCKSTEP_LANE static T sum(int64_t n, F term) {
    __shared__ T warps[32];
    T own = 0;
    each(n, [&](int64_t i) { own += term(i); });
    for (int step = 16; step > 0; step /= 2) own += __shfl_xor_sync(0xFFFFFFFFU, own, step);
    __syncthreads();  // the last sum has been read
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = own;
    __syncthreads();
    T total = 0;
    for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) total += warps[warp];
    return total;
  }
};

/// Threads for a row of `n`, in whole warps.
inline unsigned threads_for(int64_t n) {
  const int64_t warps = (n + 127) / 128;
  return static_cast<unsigned>(32 * (warps < 1 ? 1 : warps > 16 ? 16 : warps));
}

}  // namespace lockstep::kernels
