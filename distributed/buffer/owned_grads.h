#pragma once

// Internal.

#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/distributed/param_and_grad_buffer.h"

namespace lockstep {

/// The parts of `range` of `buffer` whose reduced gradients this rank holds (see
/// ParamAndGradBuffer::owned), as flat views, none of them empty.
std::vector<at::Tensor> owned_grads(const ParamAndGradBuffer& buffer, ElementRange range);

/// The same for the whole buffer.
std::vector<at::Tensor> owned_grads(const ParamAndGradBuffer& buffer);

/// The parts whose reduced gradients this rank holds, whether it owns them or not (see
/// ParamAndGradBuffer::reduced). Passes over gradients must change these.
std::vector<at::Tensor> reduced_grads(const ParamAndGradBuffer& buffer, ElementRange range);
std::vector<at::Tensor> reduced_grads(const ParamAndGradBuffer& buffer);

/// UsageError naming `caller`: a number of tokens that is undefined, has not one element or, where
/// it is on the CPU, is negative or not finite.
void check_token_count(const at::Tensor& num_tokens, const char* caller);

/// Divides `grads`, of any devices, by a 0-dim fp64 tensor. 16-bit gradients are divided in fp32,
/// because an operator would first round the divisor to their dtype, in which a token count may be
/// infinite.
void divide_grads(const std::vector<at::Tensor>& grads, const at::Tensor& divisor);

}  // namespace lockstep
