#pragma once

// Internal.

#include <vector>

#include <torch/library.h>

#include "lockstep/kernels/device_kernels.h"

namespace lockstep {

/// Operators of the meta device that libtorch has only in Python, or not at all: the shapes of
/// their results. They are registered as long as the returned libraries live.
std::vector<torch::Library> planned_operators();

/// The kernels of `kernels/` for the meta device, which only call note_kernel().
kernels::DeviceKernels planned_kernels();

}  // namespace lockstep
