#include "lockstep/parallel_state/ordered_reduction.h"

#include <algorithm>
#include <bit>
#include <type_traits>

#include "lockstep/core/vector_clones.h"

namespace lockstep {
namespace {

/// Elements of one block; its accumulators stay in the first-level cache.
constexpr int64_t kBlock = 1024;

struct Bf16 {
  uint16_t bits;
};

template <class T>
struct Compute {
  using type = T;
};
template <>
struct Compute<Bf16> {
  using type = float;
};
template <>
struct Compute<_Float16> {
  using type = float;
};

#define LOCKSTEP_INLINE inline __attribute__((always_inline))

template <class T>
LOCKSTEP_INLINE auto load(T x) {
  return static_cast<typename Compute<T>::type>(x);
}
LOCKSTEP_INLINE float load(Bf16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }

template <class T>
LOCKSTEP_INLINE void store(T* to, typename Compute<T>::type x) {
  *to = static_cast<T>(x);
}
/// Rounds to nearest even; a NaN stays one.
LOCKSTEP_INLINE void store(Bf16* to, float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  to->bits = static_cast<uint16_t>(x == x ? rounded : (bits >> 16) | 0x40);
}

/// Integers wrap, as in libtorch; the overflow of a signed type would be undefined. `unsigned`:
/// types that are narrower would be promoted to int.
template <class C>
using Wrapping = std::common_type_t<std::make_unsigned_t<C>, unsigned>;

template <class C>
LOCKSTEP_INLINE C add(C a, C b) {
  if constexpr (std::is_integral_v<C>)
    return static_cast<C>(static_cast<Wrapping<C>>(a) + static_cast<Wrapping<C>>(b));
  else
    return a + b;
}
template <class C>
LOCKSTEP_INLINE C multiply(C a, C b) {
  if constexpr (std::is_integral_v<C>)
    return static_cast<C>(static_cast<Wrapping<C>>(a) * static_cast<Wrapping<C>>(b));
  else
    return a * b;
}

struct Sum {
  template <class C>
  static LOCKSTEP_INLINE C combine(C a, C b) {
    return add(a, b);
  }
};
/// A NaN on either side is kept.
struct Max {
  template <class C>
  static LOCKSTEP_INLINE C combine(C a, C b) {
    return a > b || a != a ? a : b;
  }
};
struct Min {
  template <class C>
  static LOCKSTEP_INLINE C combine(C a, C b) {
    return a < b || a != a ? a : b;
  }
};

template <class C>
struct Scale {
  C multiplier, divisor;
  LOCKSTEP_INLINE C operator()(C x) const {
    return static_cast<C>(multiply(x, multiplier) / divisor);
  }
};
struct NoScale {
  template <class C>
  LOCKSTEP_INLINE C operator()(C x) const {
    return x;
  }
};

/// The common case of two ranks, in one pass.
template <class Op, class T, class S>
LOCKSTEP_INLINE void combine_two(T* out, const T* a, const T* b, int64_t n, S scale) {
#pragma GCC ivdep  // `out` may be `a` or `b`, element by element
  for (int64_t i = 0; i < n; ++i) store(&out[i], Op::combine(scale(load(a[i])), scale(load(b[i]))));
}

template <class Op, class T, class C, class S>
LOCKSTEP_INLINE void combine_block(T* out, const void* const* terms, int64_t count, int64_t first,
                                   int64_t n, S scale, C result_divisor) {
  C sums[kBlock];
  const T* x = static_cast<const T*>(terms[0]) + first;
  for (int64_t i = 0; i < n; ++i) sums[i] = scale(load(x[i]));
  for (int64_t term = 1; term < count; ++term) {
    x = static_cast<const T*>(terms[term]) + first;
    for (int64_t i = 0; i < n; ++i) sums[i] = Op::combine(sums[i], scale(load(x[i])));
  }
  if (result_divisor != C(1))
    for (int64_t i = 0; i < n; ++i) sums[i] = static_cast<C>(sums[i] / result_divisor);
  for (int64_t i = 0; i < n; ++i) store(&out[i], sums[i]);
}

template <class Op, class T, class C, class S>
LOCKSTEP_INLINE void combine_scaled(void* out, const void* const* terms, int64_t count, int64_t n,
                                    S scale, C result_divisor) {
  T* const to = static_cast<T*>(out);
  if (count == 2 && result_divisor == C(1))
    return combine_two<Op>(to, static_cast<const T*>(terms[0]), static_cast<const T*>(terms[1]), n,
                           scale);
  for (int64_t first = 0; first < n; first += kBlock)
    combine_block<Op, T>(to + first, terms, count, first, std::min(kBlock, n - first), scale,
                         result_divisor);
}

template <class Op, class T>
LOCKSTEP_INLINE void combine(void* out, const void* const* terms, int64_t count, int64_t n,
                             const HostReduction& reduction) {
  using C = typename Compute<T>::type;
  const auto result_divisor = static_cast<C>(reduction.result_divisor);
  if (reduction.multiplier == 1 && reduction.divisor == 1)
    return combine_scaled<Op, T>(out, terms, count, n, NoScale{}, result_divisor);
  combine_scaled<Op, T>(
      out, terms, count, n,
      Scale<C>{static_cast<C>(reduction.multiplier), static_cast<C>(reduction.divisor)},
      result_divisor);
}

template <class T>
LOCKSTEP_INLINE void run(const HostReduction& reduction, void* out, const void* const* terms,
                         int64_t count, int64_t n) {
  switch (reduction.op) {
    case HostReduceOp::max:
      return combine<Max, T>(out, terms, count, n, reduction);
    case HostReduceOp::min:
      return combine<Min, T>(out, terms, count, n, reduction);
    default:
      return combine<Sum, T>(out, terms, count, n, reduction);
  }
}

LOCKSTEP_VECTOR_CLONES
void run_f32(const HostReduction& r, void* out, const void* const* terms, int64_t count,
             int64_t n) {
  run<float>(r, out, terms, count, n);
}
LOCKSTEP_VECTOR_CLONES
void run_f64(const HostReduction& r, void* out, const void* const* terms, int64_t count,
             int64_t n) {
  run<double>(r, out, terms, count, n);
}
LOCKSTEP_VECTOR_CLONES
void run_bf16(const HostReduction& r, void* out, const void* const* terms, int64_t count,
              int64_t n) {
  run<Bf16>(r, out, terms, count, n);
}
LOCKSTEP_VECTOR_CLONES
void run_f16(const HostReduction& r, void* out, const void* const* terms, int64_t count,
             int64_t n) {
  run<_Float16>(r, out, terms, count, n);
}

}  // namespace

void reduce_in_order(HostType type, const HostReduction& reduction, void* out,
                     const void* const* terms, int64_t count, int64_t n) {
  switch (type) {
    case HostType::f32:
      return run_f32(reduction, out, terms, count, n);
    case HostType::f64:
      return run_f64(reduction, out, terms, count, n);
    case HostType::bf16:
      return run_bf16(reduction, out, terms, count, n);
    case HostType::f16:
      return run_f16(reduction, out, terms, count, n);
    case HostType::i8:
      return run<int8_t>(reduction, out, terms, count, n);
    case HostType::i16:
      return run<int16_t>(reduction, out, terms, count, n);
    case HostType::i32:
      return run<int32_t>(reduction, out, terms, count, n);
    case HostType::i64:
      return run<int64_t>(reduction, out, terms, count, n);
    case HostType::u8:
      return run<uint8_t>(reduction, out, terms, count, n);
  }
}

}  // namespace lockstep
