#pragma once

// Internal: the operators with their own kernels; the fallback queues all others.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

namespace lockstep::testing {

void add_view_kernels(torch::Library& library);
void add_copy_kernels(torch::Library& library);

/// The boxed fallback: determines shapes at once and runs the CPU's kernel later.
void launch_operator(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                     torch::jit::Stack* stack);

}  // namespace lockstep::testing
