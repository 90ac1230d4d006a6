#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/core/placement.h"
#include "lockstep/parallel_state/process_group.h"

/// Collectives that autograd differentiates: each function sends in forward, and its counterpart
/// sends in backward. The pairs are those of Megatron Core's tensor_parallel/mappings.py, over any
/// group and any dimension.
///
///     function                  forward           backward
///     copy_to_group             nothing           all-reduce
///     reduce_from_group         all-reduce        nothing
///     scatter_to_group          nothing (cuts)    all-gather
///     gather_from_group         all-gather        nothing (cuts), or reduce-scatter
///     reduce_scatter_to_group   reduce-scatter    all-gather
///     all_to_all_rows           all-to-all        all-to-all
///     all_to_all_dims           all-to-all        all-to-all
///
/// Every function must be called by all ranks of the group in the same order, with tensors of which
/// all require a gradient or none does, and backward must come to its result on all ranks or on
/// none. `x` may have any strides and is left as it is; the result is contiguous and, except that
/// of copy_to_group, has memory of its own. `label` says what `x` is; collectives and errors of
/// backward carry the label "gradient of <label>". `dim` may count from the end; dimension 0 costs
/// no copy to reorder elements, others one or two.
///
/// Nothing is recorded where gradients are off or `x` requires none. In a group of one rank the
/// result is `x` itself. Gradients have the dtype of `x`; sums of bf16 and fp16 are added as
/// collectives.h says. Only the first derivative exists: backward with create_graph is a
/// UsageError.
///
/// Errors: UsageError, naming label, dimension, size and group, for a dimension that `x` has not or
/// that does not divide by the number of ranks; CommunicationError as in collectives.h, from
/// backward too.
namespace lockstep {

/// x, the same on all ranks, for a computation of which each rank does a part. Backward adds the
/// parts of the gradient. The result shares x's memory and cannot be changed in place where a
/// gradient is recorded.
at::Tensor copy_to_group(const at::Tensor& x, const ProcessGroup& group, std::string_view label);

/// The sum of x over the ranks. The gradient of the sum, which must be the same on all ranks, is
/// that of every term.
at::Tensor reduce_from_group(const at::Tensor& x, const ProcessGroup& group,
                             std::string_view label);

/// This rank's chunk along `dim` of x, which is the same on all ranks. Backward gathers the
/// gradients of the chunks.
at::Tensor scatter_to_group(const at::Tensor& x, const ProcessGroup& group, int64_t dim,
                            std::string_view label);

/// The chunks x of all ranks, joined along `dim` in group order. `gradient` says in which state the
/// gradient of the result comes: `complete` (what follows is the same on all ranks) makes backward
/// take this rank's chunk; `partial_sum` (each rank goes on with a part of the computation, as
/// before a column-parallel layer with sequence parallelism) makes it a reduce-scatter, and
/// `partial_mean` one that averages.
at::Tensor gather_from_group(const at::Tensor& x, const ProcessGroup& group, int64_t dim,
                             GradientState gradient, std::string_view label);

/// This rank's chunk along `dim` of the sum of x over the ranks. Backward gathers the gradients of
/// the chunks.
at::Tensor reduce_scatter_to_group(const at::Tensor& x, const ProcessGroup& group, int64_t dim,
                                   std::string_view label);

/// Sends input_rows[i] rows of dimension 0 of x to the rank at position i and returns the
/// output_rows[i] rows that it gets from each, in group order. Backward sends the gradient's rows
/// back.
at::Tensor all_to_all_rows(const at::Tensor& x, const ProcessGroup& group,
                           const std::vector<int64_t>& output_rows,
                           const std::vector<int64_t>& input_rows, std::string_view label);

/// Exchanges which dimension is cut: x holds this rank's chunk along `gather_dim` and all of
/// `split_dim`, the result all of `gather_dim` and this rank's chunk along `split_dim`. With
/// split_dim 1 and gather_dim 0, [sequence / n, hidden] becomes [sequence, hidden / n]. Backward
/// does the reverse.
at::Tensor all_to_all_dims(const at::Tensor& x, const ProcessGroup& group, int64_t split_dim,
                           int64_t gather_dim, std::string_view label);

}  // namespace lockstep
