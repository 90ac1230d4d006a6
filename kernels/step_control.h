#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::kernels {

/// What a step learns from its gradients: fp64 [2], on the device of the tensors, so that nobody
/// waits for it. Element 0 takes the place of the scalars' grad_scale; where element 1 is 0 the
/// kernel leaves everything as it is, and element 0 has no meaning. Undefined: the scalars hold.
///
/// For a step that is recorded and launched again, more elements hold what changes from step to
/// step, in the place of the scalars' numbers: learning_rate and weight_decay, and with adamw()
/// bias_correction1 and bias_correction2.
using StepControl = at::Tensor;

/// Elements of a StepControl with those.
inline constexpr int64_t kAdamWControl = 6, kSgdControl = 4;

}  // namespace lockstep::kernels
