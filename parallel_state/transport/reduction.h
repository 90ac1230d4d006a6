#pragma once

#include <cstdint>

#include "lockstep/core/placement.h"

namespace lockstep {

/// A reduction whose terms are scaled first: x becomes x * numerator / denominator, rounded once.
/// The two numbers must be the same on every rank, like everything else in a call (see
/// collectives.h). Scaling costs no separate pass over memory if the reduction can do it on the way
/// (sums over the host transport). A factor other than 1 is for floating-point sums and averages.
struct Reduction {
  ReduceOp op = ReduceOp::sum;
  int64_t numerator = 1;
  int64_t denominator = 1;

  Reduction(ReduceOp reduce_op, int64_t times = 1, int64_t divided_by = 1)
      : op(reduce_op), numerator(times), denominator(divided_by) {}
  bool scales() const { return numerator != denominator; }
};

}  // namespace lockstep
