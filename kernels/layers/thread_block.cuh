#pragma once

// Internal: CUDA threads that run a body, see vector_block.h.

#include <cstdint>

#include "lockstep/kernels/element_pack.cuh"
#include "lockstep/kernels/exp_sums.h"
#include "lockstep/kernels/float_storage.h"

namespace lockstep::kernels {

/// The threads along x of a block go over a row in turns, each `kPack` elements at a time. Rows
/// must begin where packs may, see packs_fit().
template <int kPack>
struct ThreadLanes {
  /// Calls f(i) for i = 0 ... n - 1; a thread gets the same i in each call with the same n, here
  /// and below.
  template <class F>
  LOCKSTEP_LANE static void each(int64_t n, F f) {
    for_packs(n, [&](int64_t first, int count) {
      for (int k = 0; k < count; ++k) f(first + k);
    });
  }

  template <class F, class To, class... From>
  LOCKSTEP_LANE static void map(int64_t n, F f, To* to, const From*... from) {
    for_packs(n, [&](int64_t i, int count) {
      if (count == kPack) return map_pack(f, to + i, Pack<From>(from + i)...);
      for (int k = 0; k < count; ++k) narrow(f(widen(from[i + k])...), to[i + k]);
    });
  }

  template <class F, class A, class B, class... From>
  LOCKSTEP_LANE static void map_two(int64_t n, F f, A* a, B* b, const From*... from) {
    for_packs(n, [&](int64_t i, int count) {
      if (count == kPack) return map_pack_two(f, a + i, b + i, Pack<From>(from + i)...);
      for (int k = 0; k < count; ++k) {
        const auto both = f(widen(from[i + k])...);
        narrow(both.a, a[i + k]);
        narrow(both.b, b[i + k]);
      }
    });
  }

  template <class F, class A, class B, class C, class... From>
  LOCKSTEP_LANE static void map_three(int64_t n, F f, A* a, B* b, C* c, const From*... from) {
    for_packs(n, [&](int64_t i, int count) {
      if (count == kPack) return map_pack_three(f, a + i, b + i, c + i, Pack<From>(from + i)...);
      for (int k = 0; k < count; ++k) {
        const auto all = f(widen(from[i + k])...);
        narrow(all.a, a[i + k]);
        narrow(all.b, b[i + k]);
        narrow(all.c, c[i + k]);
      }
    });
  }

  template <class T>
  LOCKSTEP_LANE static void copy(int64_t n, T* to, const T* from) {
    for_packs(n, [&](int64_t i, int count) {
      if (count == kPack) return Pack<T>(from + i).store(to + i);
      for (int k = 0; k < count; ++k) to[i + k] = from[i + k];
    });
  }

  /// Whether this thread gets element `i` of a row.
  LOCKSTEP_LANE static bool owns(int64_t i) { return i / kPack % blockDim.x == threadIdx.x; }
  LOCKSTEP_LANE static bool leads() { return threadIdx.x == 0; }
  LOCKSTEP_LANE static float exp(float x) { return expf(x); }
  LOCKSTEP_LANE static double exp(double x) { return ::exp(x); }
  template <class T>
  LOCKSTEP_LANE static T exp_normal(T x) {
    return exp(x);
  }

 protected:
  template <class T>
  using Pack = ElementPack<T, kPack>;

  /// Calls f(first, count) for this thread's packs, the last of which may be shorter.
  template <class F>
  LOCKSTEP_LANE static void for_packs(int64_t n, F f) {
    for (int64_t i = int64_t{threadIdx.x} * kPack; i < n; i += int64_t{blockDim.x} * kPack)
      f(i, n - i < kPack ? static_cast<int>(n - i) : kPack);
  }

 private:
  template <class F, class To, class... Packs>
  LOCKSTEP_LANE static void map_pack(F f, To* to, const Packs&... packs) {
    Pack<To> result;
#pragma unroll
    for (int k = 0; k < kPack; ++k) narrow(f(widen(packs.at[k])...), result.at[k]);
    result.store(to);
  }

  template <class F, class A, class B, class... Packs>
  LOCKSTEP_LANE static void map_pack_two(F f, A* a, B* b, const Packs&... packs) {
    Pack<A> of_a;
    Pack<B> of_b;
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      const auto both = f(widen(packs.at[k])...);
      narrow(both.a, of_a.at[k]);
      narrow(both.b, of_b.at[k]);
    }
    of_a.store(a);
    of_b.store(b);
  }

  template <class F, class A, class B, class C, class... Packs>
  LOCKSTEP_LANE static void map_pack_three(F f, A* a, B* b, C* c, const Packs&... packs) {
    Pack<A> of_a;
    Pack<B> of_b;
    Pack<C> of_c;
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      const auto all = f(widen(packs.at[k])...);
      narrow(all.a, of_a.at[k]);
      narrow(all.b, of_b.at[k]);
      narrow(all.c, of_c.at[k]);
    }
    of_a.store(a);
    of_b.store(b);
    of_c.store(c);
  }
};

/// All threads of a block, up to 1024, in whole warps along x.
template <int kPack>
struct ThreadBlock : ThreadLanes<kPack> {
  using Lanes = ThreadLanes<kPack>;

  /// A block has one row.
  static constexpr int64_t kMostRows = 1;
  template <class T>
  LOCKSTEP_LANE static int64_t rows_together(int64_t /*width*/) {
    return 1;
  }

  /// The sum of f(from[i]...) for each thread, in an order that depends only on n, kPack and the
  /// number of threads. All threads call it.
  template <class W, class F, class... From>
  LOCKSTEP_LANE static W sum(int64_t n, F f, const From*... from) {
    W own = 0;
    Lanes::for_packs(n, [&](int64_t i, int count) {
      if (count == kPack) return add_pack(own, f, ElementPack<From, kPack>(from + i)...);
      for (int k = 0; k < count; ++k) own += f(widen(from[i + k])...);
    });
    return joined(own, [](W a, W b) { return a + b; });
  }

  /// map(), then sum() of the values that it has written.
  template <class W, class F, class To, class... From>
  LOCKSTEP_LANE static W map_sum(int64_t n, F f, To* to, const From*... from) {
    Lanes::map(n, f, to, from...);
    return sum<W>(
        n, [](W x) { return x; }, to);
  }

  /// The sums for from[i], with the plain sum if `kPlain`, for each thread. All threads call it.
  template <bool kPlain, class W, class T>
  LOCKSTEP_LANE static ExpSums<W> exp_sums(int64_t n, const T* from) {
    ExpSums<W> own;
    Lanes::for_packs(n, [&](int64_t i, int count) {
      if (count == kPack) return add_exponentials<kPlain>(own, ElementPack<T, kPack>(from + i));
      for (int k = 0; k < count; ++k)
        add_exponentials<kPlain>(own, ElementPack<T, 1>(from + i + k));
    });
    const auto add = [](W a, W b) { return a + b; };
    ExpSums<W> all;
    all.highest = joined(own.highest, [](W a, W b) { return b > a ? b : a; });
    const bool any = own.highest > ExpSums<W>::kLowest;
    all.exponentials = joined(
        any ? own.exponentials * Lanes::exp(own.highest - all.highest) : own.exponentials, add);
    if constexpr (kPlain) all.plain = joined(own.plain, add);
    return all;
  }

 private:
  template <class W, class F, class... Packs>
  LOCKSTEP_LANE static void add_pack(W& own, F f, const Packs&... packs) {
#pragma unroll
    for (int k = 0; k < kPack; ++k) own += f(widen(packs.at[k])...);
  }

  /// Rescales only once, for the highest element of a pack.
  template <bool kPlain, class W, class T, int kCount>
  LOCKSTEP_LANE static void add_exponentials(ExpSums<W>& own, const ElementPack<T, kCount>& pack) {
    W highest = own.highest;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const W x = widen(pack.at[k]);
      highest = x > highest ? x : highest;
    }
    if (highest > own.highest) {
      own.exponentials *= Lanes::exp(own.highest - highest);
      own.highest = highest;
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const W x = widen(pack.at[k]);
      if (x != ExpSums<W>::kLowest) own.exponentials += Lanes::exp(x - highest);
      if constexpr (kPlain) own.plain += x;
    }
  }

  template <class W, class Join>
  LOCKSTEP_LANE static W joined(W own, Join join) {
    __shared__ W warps[32];
    for (int step = 16; step > 0; step /= 2)
      own = join(own, __shfl_xor_sync(0xFFFFFFFFU, own, step));
    __syncthreads();  // earlier results have been read
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = own;
    __syncthreads();
    W all = warps[0];
    for (unsigned warp = 1; warp < blockDim.x / 32; ++warp) all = join(all, warps[warp]);
    return all;
  }
};

/// The threads for a row of `n` elements, in whole warps, so that each gets about as many packs.
inline unsigned threads_for(int64_t n, int pack) {
  constexpr int64_t kMost = 512;
  const int64_t packs = (n + pack - 1) / pack;
  const int64_t turns = packs < kMost ? 1 : (packs + kMost - 1) / kMost;
  const int64_t warps = ((packs + turns - 1) / turns + 31) / 32;
  return static_cast<unsigned>(32 * (warps < 1 ? 1 : warps));
}

}  // namespace lockstep::kernels
