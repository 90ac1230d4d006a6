#pragma once

// Internal.

#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/parallel_state/process_group.h"

namespace lockstep {

/// The name that errors use for broadcast_values() of frozen parameters and module buffers.
inline constexpr const char* kUntrainedLabel = "frozen parameters and module buffers";

/// Gives all ranks of `group` the values that `tensors` have on the rank at position `source`, in
/// one call, whatever their strides. Returns when the values have arrived. A tensor that is
/// expanded stays so, unless the values differ where it has one element in memory: then it gets
/// memory of its own.
void broadcast_values(const ProcessGroup& group, const std::vector<at::Tensor>& tensors,
                      int64_t source, const char* label);

}  // namespace lockstep
