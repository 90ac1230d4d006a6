#pragma once

// Internal.

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "lockstep/models/linear_function.h"
#include "lockstep/models/vocab_partition.h"

namespace lockstep {

/// vocab_parallel_cross_entropy() of parallel_linear(hidden, weight), where the logits of only
/// `chunk_size` tokens exist at a time. Forward computes them chunk by chunk and keeps three
/// numbers per token, four with label smoothing. Backward computes them again, writes their
/// gradient over them and adds its two products. That costs one matrix product more than with all
/// logits. Losses and gradients are the same except for rounding, whatever the gradient of each
/// loss.
///
/// `hidden` as parallel_linear() takes it, `weight` [vocabulary.rows, width], `labels` [tokens] of
/// int64 in the order of the flattened `hidden`, over all ranks of the group with
/// LinearInput::sequence_chunk -> [tokens], as from vocab_parallel_cross_entropy().
///
/// The collectives are those of the two functions, for all tokens at once. The weight's gradient is
/// added chunk by chunk straight into weight.grad() if a wrapper waits for it there and its dtype
/// is fp32 or fp64; otherwise it is summed in at least fp32 and rounded once. It is never deferred,
/// and all of the input is gathered before the first product: `options.deferred` and
/// `options.overlap` are not used. UsageError: what either function refuses, and a chunk_size below
/// 1.
at::Tensor parallel_linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                         const at::Tensor& labels, const VocabPartition& vocabulary,
                                         const ParallelLinearOptions& options, int64_t chunk_size,
                                         double label_smoothing = 0);

}  // namespace lockstep
