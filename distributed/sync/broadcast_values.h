#pragma once

// Internal.

#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/parallel_state/process_group.h"

namespace lockstep {

/// What broadcast_values() of frozen parameters and module buffers is called in errors.
inline constexpr const char* kUntrainedLabel = "frozen parameters and module buffers";

/// Gives all ranks of `group` the values that `tensors` have on the rank at position `source`, in
/// one call, however they are strided. Returns when they are there.
void broadcast_values(const ProcessGroup& group, const std::vector<at::Tensor>& tensors,
                      int64_t source, const char* label);

}  // namespace lockstep
