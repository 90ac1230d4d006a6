#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::kernels {

/// What a step learns from its gradients: fp64 [2], on the device of the tensors, so that the host
/// does not wait for it. Element 0 replaces the scalars' grad_scale; if element 1 is 0, the kernel
/// leaves everything unchanged, and element 0 has no meaning. Undefined: the scalars apply.
///
/// For a step that is recorded and launched again, additional elements hold what changes from step
/// to step, in place of the scalars: learning_rate and weight_decay, and with adamw() also
/// bias_correction1 and bias_correction2.
using StepControl = at::Tensor;

/// Number of elements of a StepControl with these.
inline constexpr int64_t kAdamWControl = 6, kSgdControl = 4;

}  // namespace lockstep::kernels
