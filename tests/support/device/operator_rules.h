#pragma once

// Internal: where CUDA differs from the CPU's kernels.

#include "lockstep/tests/support/device/operator_call.h"

namespace lockstep::testing {

/// Throws NotImplementedError where CUDA's kernel lacks the dtype, and c10::Error where it refuses
/// operands that the CPU's accepts.
void refuse_what_cuda_lacks(const OperatorCall& call);

/// Whether the host has to wait for values: results that are not tensors, data-dependent shapes,
/// masks as indices, values that CUDA's kernel takes from the host.
bool needs_values(const OperatorCall& call);

/// Whether the operator's meta kernel refuses operands that CUDA's accepts: that of index_add looks
/// at a row, which an empty tensor does not have.
bool meta_kernel_is_stricter(const OperatorCall& call);

/// The result of an operator on arguments on the CPU, if CUDA's kernel rounds otherwise: the
/// gradient of an embedding in bf16 and fp16 is added up in fp32.
std::optional<at::Tensor> computed_as_by_cuda(const c10::OperatorHandle& op,
                                              const std::vector<c10::IValue>& arguments);

/// Whether the operator only writes into its arguments and does not change their shapes.
bool works_in_place(const OperatorCall& call);

/// Whether the operator draws random numbers into an argument that it does not read.
bool only_draws(const OperatorCall& call);

/// The index of the argument that return value `position` is, if the operator writes into it.
std::optional<size_t> written_argument(const OperatorCall& call, size_t position);

/// The index of the argument that takes a generator.
std::optional<size_t> generator_argument(const c10::FunctionSchema& schema);

}  // namespace lockstep::testing
