#pragma once

#include <memory>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace lockstep::testing {

/// Adds a hook that waits for the gradient of `parameter` in its .grad(), as
/// DistributedDataParallel does. `calls` counts how often the hook runs.
inline void count_gradients(const at::Tensor& parameter, int& calls) {
  class Hook : public torch::autograd::PostAccumulateGradHook {
   public:
    explicit Hook(int& calls) : calls_(calls) {}
    void operator()(const torch::autograd::Variable&) override { ++calls_; }

   private:
    int& calls_;
  };
  torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<Hook>(calls));
}

}  // namespace lockstep::testing
