#include "lockstep/distributed/gradient_hook.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace lockstep {
namespace {

class Hook : public torch::autograd::FunctionPostHook {
 public:
  explicit Hook(std::function<void()> call) : call_(std::move(call)) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    call_();
    return outputs;
  }

 private:
  std::function<void()> call_;
};

}  // namespace

GradientHook::GradientHook(const at::Tensor& parameter, std::function<void()> call)
    : accumulator_(torch::autograd::impl::grad_accumulator(parameter)),
      key_(accumulator_->add_post_hook(std::make_unique<Hook>(std::move(call)))) {}

GradientHook::~GradientHook() {
  if (accumulator_) accumulator_->del_post_hook(key_);
}

}  // namespace lockstep
