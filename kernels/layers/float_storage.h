#pragma once

// Internal: elements as they are stored in memory, for bodies that g++ and nvcc compile.

#include <cstdint>

#include "lockstep/kernels/narrow_floats.h"

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define LOCKSTEP_LANE __device__ __forceinline__
#define LOCKSTEP_LANE_LAMBDA
#else
/// For functions and lambdas of a body: inlined, so that each clone has its own vector width.
#define LOCKSTEP_LANE inline __attribute__((always_inline))
#define LOCKSTEP_LANE_LAMBDA __attribute__((always_inline))
#endif

namespace lockstep::kernels {

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

template <class T>
struct WideType {
  using type = float;
};
template <>
struct WideType<double> {
  using type = double;
};
/// The type in which elements of T are computed: fp64 for fp64, otherwise fp32.
template <class T>
using Wide = typename WideType<T>::type;

/// The result of a function with two outputs.
template <class W>
struct Two {
  W a, b;
};

/// The same for three.
template <class W>
struct Three {
  W a, b, c;
};

template <class T>
LOCKSTEP_LANE T widen(T x) {
  return x;
}

#ifdef __CUDACC__
LOCKSTEP_LANE float widen(Bf16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }
LOCKSTEP_LANE float widen(Fp16 x) { return __half2float(__ushort_as_half(x.bits)); }
LOCKSTEP_LANE void narrow(float x, Bf16& to) {
  to.bits = __bfloat16_as_ushort(__float2bfloat16_rn(x));
}
LOCKSTEP_LANE void narrow(float x, Fp16& to) { to.bits = __half_as_ushort(__float2half_rn(x)); }
/// A sum that nvcc does not fuse with a product before it, which would not be rounded.
LOCKSTEP_LANE float sum_of_rounded(float a, float b) { return __fadd_rn(a, b); }
LOCKSTEP_LANE double sum_of_rounded(double a, double b) { return __dadd_rn(a, b); }
#else
LOCKSTEP_LANE float widen(Bf16 x) { return widen_bf16(x.bits); }
LOCKSTEP_LANE float widen(Fp16 x) { return widen_fp16(x.bits); }
LOCKSTEP_LANE void narrow(float x, Bf16& to) { to.bits = round_to_bf16(x); }
LOCKSTEP_LANE void narrow(float x, Fp16& to) { to.bits = round_to_fp16(x); }
template <class W>
LOCKSTEP_LANE W sum_of_rounded(W a, W b) {
  return a + b;  // -ffp-contract=off
}
#endif

/// `to` becomes `x`, rounded to nearest even.
LOCKSTEP_LANE void narrow(float x, float& to) { to = x; }
LOCKSTEP_LANE void narrow(double x, double& to) { to = x; }

}  // namespace lockstep::kernels
