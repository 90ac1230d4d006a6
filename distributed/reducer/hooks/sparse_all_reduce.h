#pragma once

// Internal.

#include <functional>
#include <string>

#include <ATen/core/Tensor.h>

#include "lockstep/parallel_state/process_group.h"

namespace lockstep {

/// Starts to add sparse COO tensors of one size over the ranks of `group` and to divide the sum by
/// `divisor`. The returned function waits and gives the coalesced result, the same bits on every
/// rank; it is called by all ranks in the same order, because it communicates.
///
/// Gathers the number of entries of each rank, then indices and values padded to the largest: bytes
/// in proportion to the rows that were used. With `rows` (sorted, distinct, the same on all ranks,
/// covering every rank's rows; on any device) it is one dense all-reduce of [rows, ...] instead.
/// UsageError: a row that is not among `rows`; `rows` with more than one sparse dimension.
std::function<at::Tensor()> start_sparse_all_reduce(const ProcessGroup& group,
                                                    const at::Tensor& tensor,
                                                    const at::Tensor& rows, int64_t divisor,
                                                    const std::string& label);

}  // namespace lockstep
