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
/// All ranks of the group must call every function in the same order. The tensors must require a
/// gradient on all ranks or on none, and backward must reach the result on all ranks or on none.
/// `x` may have any strides and is not changed; the result is contiguous and, except for
/// copy_to_group, has its own memory. `label` says what `x` is; collectives and errors of backward
/// carry the label "gradient of <label>". `dim` may be negative. Dimension 0 needs no copy to
/// reorder elements; other dimensions need one or two.
///
/// Nothing is recorded if grad mode is off or `x` does not require a gradient. In a group of one
/// rank the result is `x` itself. Gradients have the dtype of `x`; bf16 and fp16 are summed as
/// collectives.h says. Only the first derivative exists: backward with create_graph is a
/// UsageError.
///
/// Errors: UsageError, naming label, dimension, size and group, for a dimension that does not exist
/// or is not divisible by the number of ranks; CommunicationError as in collectives.h, also from
/// backward.
namespace lockstep {

/// Returns x, which is the same on all ranks, for a computation of which each rank does a part.
/// Backward sums the ranks' parts of the gradient. The result shares x's memory and cannot be
/// changed in place if a gradient is recorded.
at::Tensor copy_to_group(const at::Tensor& x, const ProcessGroup& group, std::string_view label);

/// The sum of x over the ranks. The gradient of the sum must be the same on all ranks; it is also
/// the gradient of each term.
at::Tensor reduce_from_group(const at::Tensor& x, const ProcessGroup& group,
                             std::string_view label);

/// This rank's chunk along `dim` of x, which is the same on all ranks. Backward gathers the
/// gradients of the chunks.
at::Tensor scatter_to_group(const at::Tensor& x, const ProcessGroup& group, int64_t dim,
                            std::string_view label);

/// The chunks x of all ranks, concatenated along `dim` in group order. `gradient` is the state of
/// the result's gradient. `complete` (what follows is the same on all ranks): backward takes this
/// rank's chunk. `partial_sum` (each rank continues with a part of the computation, as before a
/// column-parallel layer with sequence parallelism): backward is a reduce-scatter. `partial_mean`:
/// backward is a reduce-scatter that averages.
at::Tensor gather_from_group(const at::Tensor& x, const ProcessGroup& group, int64_t dim,
                             GradientState gradient, std::string_view label);

/// This rank's chunk along `dim` of the sum of x over the ranks. Backward gathers the gradients of
/// the chunks.
at::Tensor reduce_scatter_to_group(const at::Tensor& x, const ProcessGroup& group, int64_t dim,
                                   std::string_view label);

/// Sends input_rows[i] rows of dimension 0 of x to the rank at position i and returns the
/// output_rows[i] rows that it receives from each, in group order. Backward sends the gradient's
/// rows back.
at::Tensor all_to_all_rows(const at::Tensor& x, const ProcessGroup& group,
                           const std::vector<int64_t>& output_rows,
                           const std::vector<int64_t>& input_rows, std::string_view label);

/// Changes which dimension is split: x has this rank's chunk along `gather_dim` and all of
/// `split_dim`; the result has all of `gather_dim` and this rank's chunk along `split_dim`. With
/// split_dim 1 and gather_dim 0, [sequence / n, hidden] becomes [sequence, hidden / n]. Backward
/// does the reverse.
at::Tensor all_to_all_dims(const at::Tensor& x, const ProcessGroup& group, int64_t split_dim,
                           int64_t gather_dim, std::string_view label);

}  // namespace lockstep
