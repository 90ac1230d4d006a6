#pragma once

// Internal: one step of DTensor::redistribute.

#include <string>

#include <ATen/core/Tensor.h>

#include "lockstep/core/placement.h"
#include "lockstep/parallel_state/process_group.h"

namespace lockstep {

/// The part that this rank holds of `tensor` [any shape], cut along `dim` for `count` ranks, as a
/// separate tensor. Nothing is sent.
at::Tensor cut_chunk(const at::Tensor& tensor, int64_t dim, int64_t count, int64_t index);

/// `local` after its placement along the axis of `group` has changed from Partial or Shard.
/// `length` is the size of the dimension of a Shard `from` over all ranks of the group. Takes at
/// most one collective: Partial to Replicate an all-reduce, Partial to Shard a reduce-scatter,
/// Shard to Replicate an all-gather, Shard to another Shard an all-to-all. Does not change `local`.
at::Tensor change_placement(const at::Tensor& local, const Placement& from, const Placement& to,
                            int64_t length, const ProcessGroup& group, const std::string& label);

}  // namespace lockstep
