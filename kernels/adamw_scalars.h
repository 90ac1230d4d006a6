#pragma once

namespace lockstep::kernels {

/// The numbers of one AdamW step.
struct AdamWScalars {
  double learning_rate = 0;
  double beta1 = 0;
  double beta2 = 0;
  double eps = 0;
  double weight_decay = 0;
  double bias_correction1 = 1;  ///< 1 - beta1^step
  double bias_correction2 = 1;  ///< 1 - beta2^step
  double grad_scale = 1;        ///< multiplies the gradients first, as clipping does
};

}  // namespace lockstep::kernels
