#pragma once

// Internal: what CUDA does otherwise than the CPU's kernels.

#include "lockstep/tests/support/device/operator_call.h"

namespace lockstep::testing {

/// NotImplementedError where CUDA's kernel lacks the dtype.
void refuse_what_cuda_lacks(const OperatorCall& call);

/// Whether the host has to wait for values: results that are no tensors, shapes that depend on
/// data, masks as indices, values that CUDA's kernel takes from the host.
bool needs_values(const OperatorCall& call);

/// Whether the operator's meta kernel refuses operands that CUDA's takes: index_add's looks at a
/// row, which an empty tensor has not.
bool meta_kernel_is_stricter(const OperatorCall& call);

/// Whether the operator writes into its arguments alone and does not give them other shapes.
bool works_in_place(const OperatorCall& call);

/// Whether it draws random numbers for an argument that it does not read.
bool only_draws(const OperatorCall& call);

/// Which argument return value `position` is, where it is one that the operator writes into.
std::optional<size_t> written_argument(const OperatorCall& call, size_t position);

/// The place of an argument that takes a generator.
std::optional<size_t> generator_argument(const c10::FunctionSchema& schema);

}  // namespace lockstep::testing
