#include "lockstep/optimizer/step_control.h"

#include <ATen/ATen.h>

#include "lockstep/optimizer/clip_formula.h"
#include "lockstep/optimizer/clip_grads.h"

namespace lockstep {

kernels::StepControl step_control(double norm, const OptimizerConfig& config, double loss_scale) {
  return at::tensor(
      {clip_coefficient(norm, config.clip_grad) / loss_scale, skips_step(norm, config) ? 0.0 : 1.0},
      at::kDouble);
}

kernels::StepControl step_control(const at::Tensor& norm, const OptimizerConfig& config,
                                  double loss_scale) {
  at::Tensor factor = at::ones_like(norm);
  if (config.clip_grad > 0) factor = clip_factor(norm, config.clip_grad);
  at::Tensor apply = norm.isfinite();
  if (config.grad_norm_skip_threshold)
    apply = apply.logical_and(norm.le(*config.grad_norm_skip_threshold));
  return at::stack({factor / loss_scale, apply.to(norm.scalar_type())});
}

}  // namespace lockstep
