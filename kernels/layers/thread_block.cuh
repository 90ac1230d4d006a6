#pragma once

// Internal: CUDA threads that run a body, see vector_block.h.

#include <cstdint>

#include "lockstep/kernels/exp_sums.h"
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
    T own = 0;
    each(n, [&](int64_t i) { own += term(i); });
    return joined(own, [](T a, T b) { return a + b; });
  }

  /// Of term(i), with the sum itself if `kPlain`; each thread gets it. All threads call it.
  template <bool kPlain, class T, class F>
  LOCKSTEP_LANE static ExpSums<T> exp_sums(int64_t n, F term) {
    ExpSums<T> own;
    each(n, [&](int64_t i) {
      const T x = term(i);
      if constexpr (kPlain) own.plain += x;
      if (x == ExpSums<T>::kLowest) return;
      const bool higher = x > own.highest;
      const T ratio = exp(higher ? own.highest - x : x - own.highest);
      own.exponentials = higher ? own.exponentials * ratio + 1 : own.exponentials + ratio;
      if (higher) own.highest = x;
    });
    const auto add = [](T a, T b) { return a + b; };
    ExpSums<T> all;
    all.highest = joined(own.highest, [](T a, T b) { return b > a ? b : a; });
    const bool any = own.highest > ExpSums<T>::kLowest;
    all.exponentials =
        joined(any ? own.exponentials * exp(own.highest - all.highest) : own.exponentials, add);
    if constexpr (kPlain) all.plain = joined(own.plain, add);
    return all;
  }

 private:
  template <class T, class Join>
  LOCKSTEP_LANE static T joined(T own, Join join) {
    __shared__ T warps[32];
    for (int step = 16; step > 0; step /= 2)
      own = join(own, __shfl_xor_sync(0xFFFFFFFFU, own, step));
    __syncthreads();  // what was joined before has been read
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = own;
    __syncthreads();
    T all = warps[0];
    for (unsigned warp = 1; warp < blockDim.x / 32; ++warp) all = join(all, warps[warp]);
    return all;
  }
};

/// Threads for a row of `n`, in whole warps.
inline unsigned threads_for(int64_t n) {
  const int64_t warps = (n + 127) / 128;
  return static_cast<unsigned>(32 * (warps < 1 ? 1 : warps > 16 ? 16 : warps));
}

}  // namespace lockstep::kernels
