#pragma once

#include <ATen/ATen.h>
#include <torch/nn/module.h>

namespace lockstep::testing {

/// A net whose loss need not use `b`.
struct PartlyUsed : torch::nn::Module {
  PartlyUsed() {
    a = register_parameter("a", at::ones({2}, at::kDouble));
    b = register_parameter("b", at::ones({2}, at::kDouble));
  }
  at::Tensor loss(bool use_b) const { return use_b ? (a * b).sum() : a.sum(); }
  at::Tensor a, b;
};

}  // namespace lockstep::testing
