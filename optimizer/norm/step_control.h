#pragma once

// Internal.

#include <ATen/core/Tensor.h>

#include "lockstep/core/config.h"
#include "lockstep/kernels/step_control.h"

namespace lockstep {

/// For the kernels: the factor of the gradients, which divides them by `loss_scale` and clips them,
/// and whether to make the step at all. `norm` is that of the unscaled gradients.
kernels::StepControl step_control(double norm, const OptimizerConfig& config, double loss_scale);

/// The same, decided on the device of `norm` [0-dim], without waiting for it.
kernels::StepControl step_control(const at::Tensor& norm, const OptimizerConfig& config,
                                  double loss_scale);

}  // namespace lockstep
