#pragma once

#include <string>

#include <ATen/ATen.h>

#include "lockstep/lockstep.h"

/// Lion (Chen et al., "Symbolic discovery of optimization algorithms", 2023):
///
///   p  = (1 - lr * weight_decay) * p - lr * sign(beta1 * m + (1 - beta1) * g)
///   m  = beta2 * m + (1 - beta2) * g
///
/// It keeps one number for each element, so half of what Adam keeps.
class Lion final : public lockstep::UpdateRule {
 public:
  explicit Lion(double beta1 = 0.9, double beta2 = 0.99,
                lockstep::StateDtype dtype = lockstep::StateDtype::fp32)
      : UpdateRule(
            {.name = "lion",
             .settings = "beta1 " + std::to_string(beta1) + ", beta2 " + std::to_string(beta2),
             .state = {{"exp_avg", dtype}}}),
        beta1_(beta1),
        beta2_(beta2) {}

  void update(const lockstep::UpdateRange& all) const override {
    for (const auto& segment : all.segments) {
      const lockstep::UpdateRange range = all.part(segment);
      const at::Tensor grad = range.gradient();
      const at::Tensor mean = range.state[0].to(grad.scalar_type());
      const at::Tensor direction = (mean * beta1_ + grad * (1 - beta1_)).sign();
      range.write_weights(range.weights * (1 - range.learning_rate * range.weight_decay) -
                          direction * range.learning_rate);
      range.write(range.state[0], mean * beta2_ + grad * (1 - beta2_));
    }
  }

 private:
  double beta1_, beta2_;
};
