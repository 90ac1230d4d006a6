#pragma once

// Internal.

#include <vector>

#include <torch/library.h>

#include "lockstep/kernels/device_kernels.h"

namespace lockstep {

/// Operators of the meta device that libtorch has in Python alone, or not at all: the shapes of
/// their results. They are there as long as the result lives.
std::vector<torch::Library> planned_operators();

/// The kernels of `kernels/` for the meta device, which do nothing but note_kernel().
kernels::DeviceKernels planned_kernels();

}  // namespace lockstep
