#pragma once

#include <cmath>

#include "lockstep/kernels/adamw_scalars.h"

namespace lockstep::testing {

/// The scalars of step `step` (counted from 1) in the AdamW tests.
inline kernels::AdamWScalars scalars_of_step(int step) {
  return {.learning_rate = 0.01,
          .beta1 = 0.9,
          .beta2 = 0.95,
          .eps = 1e-8,
          .weight_decay = 0.1,
          .bias_correction1 = 1 - std::pow(0.9, step),
          .bias_correction2 = 1 - std::pow(0.95, step),
          .grad_scale = 1};
}

}  // namespace lockstep::testing
