#pragma once

namespace lockstep::kernels {

/// The numbers of one SGD step.
struct SgdScalars {
  double learning_rate = 0;
  double momentum = 0;
  double weight_decay = 0;
  double grad_scale = 1;  ///< multiplies the gradients first, as clipping does
};

}  // namespace lockstep::kernels
