#pragma once

#include <cstdint>
#include <vector>

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace lockstep::testing {

/// How NCCL combines terms: `op` as c10d names it, and the factor of PREMUL_SUM.
struct NcclReduction {
  c10d::ReduceOp::RedOpType op = c10d::ReduceOp::SUM;
  double factor = 1;
};

/// One rank's contribution: its elements, and the reduction that it requested. NCCL does not
/// compare the reductions of the ranks: each rank's factor scales its own terms.
struct NcclTerm {
  const void* elements;
  NcclReduction reduction;
};

/// out[i] = terms[0][i] op terms[1][i] op ... for i < count, in the order of the ranks, with the
/// operation of the first term. bf16 and fp16 are combined in fp32 and rounded once. An average is
/// the sum, divided. The bits match the host transport, except that a scaled term is one product. A
/// sum of bool is "or". `out` may not overlap the terms.
void reduce_in_rank_order(at::ScalarType dtype, const std::vector<NcclTerm>& terms, int64_t count,
                          void* out);

/// The reduction that c10d passes to NCCL for elements of `dtype`. Errors match c10d's: TypeError
/// for an average of bool and a scaled sum of integers, ValueError for bitwise operations. A scaled
/// sum of bf16, which libtorch 2.11 turns into a sum of zeros, is a NotImplementedError.
NcclReduction nccl_reduction(const c10d::ReduceOp& op, at::ScalarType dtype);

/// Throws TypeError for a dtype that NCCL cannot move, such as int16.
void check_nccl_dtype(at::ScalarType dtype);

}  // namespace lockstep::testing
