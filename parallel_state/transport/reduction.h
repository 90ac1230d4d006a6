#pragma once

#include <cstdint>

#include "lockstep/core/placement.h"

namespace lockstep {

/// A reduction whose terms are scaled first: x becomes x * numerator / denominator. bf16 and fp16
/// are scaled in fp32 and rounded once. fp32 and fp64 are rounded after the product and again after
/// the quotient, so with both numbers other than 1 the product may overflow although the result
/// would not. On CUDA libtorch multiplies by the rounded 1 / denominator instead of dividing, so
/// the last bit may differ from the CPU's unless the denominator is a power of two. Equal numbers
/// are the factor 1, which changes nothing; the denominator is never 0. The two numbers must be the
/// same on every rank, like everything else in a call (see collectives.h). Scaling costs no
/// separate pass over memory if the reduction can do it on the way (sums over the host transport).
/// A factor other than 1 is for floating-point sums and averages.
struct Reduction {
  ReduceOp op = ReduceOp::sum;
  int64_t numerator = 1;
  int64_t denominator = 1;
  /// A reduce-scatter may change its input: a factor then costs no copy of it on a device.
  bool consumes_input = false;

  Reduction(ReduceOp reduce_op, int64_t times = 1, int64_t divided_by = 1)
      : op(reduce_op), numerator(times), denominator(divided_by) {}
  bool scales() const { return numerator != denominator; }
};

}  // namespace lockstep
