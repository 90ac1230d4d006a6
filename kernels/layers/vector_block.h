#pragma once

// Internal: one core that runs a body; compare thread_block.cuh. No libtorch here, see
// adamw_loop.h.

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "lockstep/core/vector_clones.h"
#include "lockstep/kernels/exp_sums.h"
#include "lockstep/kernels/float_storage.h"

namespace lockstep::kernels {

/// The constants of exp() below.
template <class T>
struct ExpConstants;

template <>
struct ExpConstants<float> {
  using Bits = uint32_t;
  static constexpr int kMantissa = 23, kDegree = 7;
  static constexpr float kLeast = -87.0F, kMost = 88.0F;
  static constexpr float kShift =
      0x1.8p23F;  // adding it leaves the nearest integer in the low bits
  static constexpr float kHigh = 0x1.62e4p-1F, kLow = 0x1.7f7d1cp-20F;  // ln 2 in two parts
  static constexpr float kOne = 1;
};

template <>
struct ExpConstants<double> {
  using Bits = uint64_t;
  static constexpr int kMantissa = 52, kDegree = 13;
  static constexpr double kLeast = -708.0, kMost = 709.0;
  static constexpr double kShift = 0x1.8p52;
  static constexpr double kHigh = 0x1.62e42fefa38p-1, kLow = 0x1.ef35793c7673p-45;
  static constexpr double kOne = 1;
};

/// 1 / k! for k = 0 ... kDegree.
template <class T, int kDegree>
constexpr std::array<T, kDegree + 1> taylor_of_exp() {
  std::array<T, kDegree + 1> terms = {1};
  double factorial = 1;
  for (int k = 1; k <= kDegree; ++k) {
    factorial *= k;
    terms[static_cast<size_t>(k)] = static_cast<T>(1 / factorial);
  }
  return terms;
}

/// 16 bytes of T: vectors that every clone has.
template <class T>
using Vector __attribute__((vector_size(16))) = T;

/// Joins vectors by halves, the second half to the first, and then the elements of the last one.
template <class T, size_t kCount, class Join>
LOCKSTEP_LANE T fold_vectors(const Vector<T> (&vectors)[kCount], Join join) {
  if constexpr (kCount > 1) {
    Vector<T> half[kCount / 2];
    for (size_t i = 0; i < kCount / 2; ++i) half[i] = join(vectors[i], vectors[i + kCount / 2]);
    return fold_vectors<T>(half, join);
  } else if constexpr (sizeof(T) == 4) {
    const Vector<T> all = vectors[0];
    const Vector<T> half = join(all, __builtin_shufflevector(all, all, 2, 3, 2, 3));
    return join(half, __builtin_shufflevector(half, half, 1, 1, 1, 1))[0];
  } else {
    return join(vectors[0], __builtin_shufflevector(vectors[0], vectors[0], 1, 1))[0];
  }
}

/// Joins the lanes by halves, the second half to the first, in vectors: GCC would join lane by
/// lane, through memory.
template <class T, size_t kLanes, class Join>
LOCKSTEP_LANE T fold_lanes(const T (&lanes)[kLanes], Join join) {
  constexpr size_t kWidth = sizeof(Vector<T>) / sizeof(T);
  Vector<T> vectors[kLanes / kWidth];
  for (size_t i = 0; i < kLanes / kWidth; ++i) {
    const T* const from = lanes + i * kWidth;
    if constexpr (kWidth == 4)
      vectors[i] = Vector<T>{from[0], from[1], from[2], from[3]};
    else
      vectors[i] = Vector<T>{from[0], from[1]};
  }
  return fold_vectors<T>(vectors, join);
}

/// A body's policy on the CPU: it processes a row in vectors.
struct VectorBlock {
  /// How many rows of T and of this width to take through a body's steps together: those whose four
  /// operands leave room in a first-level cache of 32 KiB.
  static constexpr int64_t kMostRows = 8;
  template <class T>
  static int64_t rows_together(int64_t width) {
    constexpr int64_t kElements = (16 << 10) / (4 * static_cast<int64_t>(sizeof(T)));
    return std::clamp<int64_t>(kElements / std::max<int64_t>(1, width), 1, kMostRows);
  }

  /// Calls f(i) for i = 0 ... n - 1. No call depends on another.
  template <class F>
  LOCKSTEP_LANE static void each(int64_t n, F f) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) f(i);
  }

  /// to[i] becomes f(from[i]...), computed in the wide type. `to` may be one of `from`.
  template <class F, class To, class... From>
  LOCKSTEP_LANE static void map(int64_t n, F f, To* to, const From*... from) {
    each(n, [=](int64_t i) LOCKSTEP_LANE_LAMBDA { narrow(f(widen(from[i])...), to[i]); });
  }

  /// The same for a function that returns Two.
  template <class F, class A, class B, class... From>
  LOCKSTEP_LANE static void map_two(int64_t n, F f, A* a, B* b, const From*... from) {
    each(n, [=](int64_t i) LOCKSTEP_LANE_LAMBDA {
      const auto both = f(widen(from[i])...);
      narrow(both.a, a[i]);
      narrow(both.b, b[i]);
    });
  }

  /// The same for a function that returns Three.
  template <class F, class A, class B, class C, class... From>
  LOCKSTEP_LANE static void map_three(int64_t n, F f, A* a, B* b, C* c, const From*... from) {
    each(n, [=](int64_t i) LOCKSTEP_LANE_LAMBDA {
      const auto all = f(widen(from[i])...);
      narrow(all.a, a[i]);
      narrow(all.b, b[i]);
      narrow(all.c, c[i]);
    });
  }

  /// map(), followed by sum() of what it has written.
  template <class W, class F, class To, class... From>
  LOCKSTEP_LANE static W map_sum(int64_t n, F f, To* to, const From*... from) {
    map(n, f, to, from...);  // in a loop of its own: stores would keep the sum from vectors
    return sum_of<W>(n, [=](int64_t i) LOCKSTEP_LANE_LAMBDA { return widen(to[i]); });
  }

  template <class T>
  LOCKSTEP_LANE static void copy(int64_t n, T* to, const T* from) {
    each(n, [=](int64_t i) LOCKSTEP_LANE_LAMBDA { to[i] = from[i]; });
  }

  /// The sum of f(from[i]...), in an order that depends only on n.
  template <class W, class F, class... From>
  LOCKSTEP_LANE static W sum(int64_t n, F f, const From*... from) {
    return sum_of<W>(n, [=](int64_t i) LOCKSTEP_LANE_LAMBDA { return f(widen(from[i])...); });
  }

  /// The ExpSums of from[i], including the plain sum if `kPlain`. Tiles stay in the cache for the
  /// second pass over them.
  template <bool kPlain, class W, class T>
  LOCKSTEP_LANE static ExpSums<W> exp_sums(int64_t n, const T* from) {
    return exp_sums_of<kPlain, W>(n,
                                  [=](int64_t i) LOCKSTEP_LANE_LAMBDA { return widen(from[i]); });
  }

  /// Whether element `i` of a row belongs to this lane.
  LOCKSTEP_LANE static bool owns(int64_t /*i*/) { return true; }

  /// The sum of term(i), in an order that depends only on n. Lanes are indexed by constants, here
  /// and in max(), so that they stay in registers.
  template <class T, class F>
  LOCKSTEP_LANE static T sum_of(int64_t n, F term) {
    constexpr int kLanes = 16;
    T lanes[kLanes] = {};
    const int64_t whole = n - n % kLanes;
    for (int64_t i = 0; i < whole; i += kLanes)
      for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += term(i + lane);
    if (whole < n) {
      T rest[kLanes] = {};
      for (int64_t i = whole; i < n; ++i) rest[i - whole] = term(i);
      for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += rest[lane];
    }
    return fold_lanes(lanes, [](auto a, auto b) LOCKSTEP_LANE_LAMBDA { return a + b; });
  }

  /// The highest term(i), -inf for none; NaN is skipped.
  template <class T, class F>
  LOCKSTEP_LANE static T max(int64_t n, F term) {
    constexpr int kLanes = 32;
    T lanes[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = ExpSums<T>::kLowest;
    const int64_t whole = n - n % kLanes;
    const auto higher = [](auto a, auto b) LOCKSTEP_LANE_LAMBDA { return b > a ? b : a; };
    for (int64_t i = 0; i < whole; i += kLanes)
      for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = higher(lanes[lane], term(i + lane));
    T highest = fold_lanes(lanes, higher);
    for (int64_t i = whole; i < n; ++i) highest = higher(highest, term(i));
    return highest;
  }

  /// exp_sums() of term(i). A tile without any number above -inf, here and in the tiles before it,
  /// adds NaN if it has one.
  template <bool kPlain, class T, class F>
  LOCKSTEP_LANE static ExpSums<T> exp_sums_of(int64_t n, F term) {
    constexpr int64_t kTile = 1024;
    ExpSums<T> all;
    for (int64_t first = 0; first < n; first += kTile) {
      const int64_t count = n - first < kTile ? n - first : kTile;
      const auto here = [=](int64_t i) LOCKSTEP_LANE_LAMBDA { return term(first + i); };
      const T highest = max<T>(count, here);
      if (highest > all.highest) {
        all.exponentials *= exp_below<VectorBlock>(all.highest, highest);
        all.highest = highest;
      }
      const T most = all.highest;
      if (most > ExpSums<T>::kLowest)
        all.exponentials += sum_of<T>(count, [=](int64_t i) LOCKSTEP_LANE_LAMBDA {
          return exp_below<VectorBlock>(here(i), most);
        });
      else
        all.exponentials += sum_of<T>(count, [=](int64_t i) LOCKSTEP_LANE_LAMBDA {
          const T x = here(i);
          return x == most ? T(0) : x;
        });
      if constexpr (kPlain) all.plain += sum_of<T>(count, here);
    }
    return all;
  }

  /// Whether this lane writes the values that a row has only once.
  LOCKSTEP_LANE static bool leads() { return true; }

  /// e^x within 2 units of the last place, by a Taylor series around the nearest multiple of ln 2.
  /// Outside the range of normal results it is the value at the bound.
  template <class T>
  LOCKSTEP_LANE static T exp(T x) {
    using C = ExpConstants<T>;
    x = x > C::kMost ? C::kMost : x;
    x = x < C::kLeast ? C::kLeast : x;
    return exp_normal(x);
  }

  /// The same for a number within the bounds, or NaN.
  template <class T>
  LOCKSTEP_LANE static T exp_normal(T x) {
    using C = ExpConstants<T>;
    const T shifted = fused(x, static_cast<T>(0x1.71547652b82fep0), C::kShift);
    const T count = shifted - C::kShift;
    const T rest = fused(-count, C::kLow, fused(-count, C::kHigh, x));
    constexpr auto kTerms = taylor_of_exp<T, C::kDegree>();
    T series = kTerms[C::kDegree];
#pragma GCC unroll 16  // as a loop it would keep g++ from vectorizing the loop over elements
    for (int k = C::kDegree; k > 0; --k) series = fused(series, rest, kTerms[k - 1]);
    using Bits = typename C::Bits;
    const Bits power =
        (std::bit_cast<Bits>(shifted) << C::kMantissa) + std::bit_cast<Bits>(C::kOne);
    return series * std::bit_cast<T>(power);
  }

 private:
  /// a b + c, rounded once unless the compiler would call the C library for each: clang for
  /// x86-64, and the sanitizers' builds.
  template <class T>
  LOCKSTEP_LANE static T fused(T a, T b, T c) {
#if LOCKSTEP_COMPILES_FMA
    return std::fma(a, b, c);
#else
    return a * b + c;
#endif
  }
};

}  // namespace lockstep::kernels
