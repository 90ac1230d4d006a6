#include "lockstep/distributed/gradient_hook.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

namespace impl = torch::autograd::impl;

/// Everything that a gradient needs is in this object and in the tensor that autograd has just
/// touched, because every other cache line would be cold.
class Hook : public torch::autograd::PostAccumulateGradHook {
 public:
  Hook(const at::Tensor& expected, GradientObserver& observer, int64_t position)
      : expected_(expected.unsafeGetTensorImpl()), observer_(observer), position_(position) {}

  void operator()(const torch::autograd::Variable& parameter) override {
    observer_.on_gradient(position_, parameter.mutable_grad().unsafeGetTensorImpl() == expected_);
  }

  const GradientObserver& observer() const { return observer_; }

 private:
  const c10::TensorImpl* expected_;
  GradientObserver& observer_;
  int64_t position_;
};

void refuse_because(const std::string& why, const std::string& name, const char* caller) {
  require<UsageError>(why.empty(), "{}: the gradient of '{}' {}", caller, name, why);
}

}  // namespace

const GradientObserver* observer_of(const at::Tensor& parameter) {
  if (!parameter.requires_grad() || !parameter.is_leaf()) return nullptr;
  const auto* const hook = dynamic_cast<const Hook*>(impl::post_acc_grad_hooks(parameter).get());
  return hook ? &hook->observer() : nullptr;
}

void refuse_hooked(const NamedParameter& parameter) {
  if (!parameter.tensor.requires_grad()) return;  // it may not even have a place for hooks
  const GradientObserver* const observer = observer_of(parameter.tensor);
  require<UsageError>(
      !impl::post_acc_grad_hooks(parameter.tensor),
      "parameter '{}' has a post-accumulate-gradient hook already{}; allowed: none, "
      "because a parameter belongs to one gradient API",
      parameter.name, observer ? ", of a " + observer->front() : "");
}

void refuse_unfinished(const std::string& name, const at::Tensor& parameter, const char* caller) {
  const GradientObserver* const observer = observer_of(parameter);
  if (observer) refuse_because(observer->unfinished(), name, caller);
}

void refuse_not_final(const std::string& name, const at::Tensor& parameter, const char* caller) {
  const GradientObserver* const observer = observer_of(parameter);
  if (observer) refuse_because(observer->not_final(), name, caller);
}

GradientHook::GradientHook(const at::Tensor& parameter, const at::Tensor& expected,
                           GradientObserver& observer, int64_t position)
    : parameter_(parameter) {
  impl::set_post_acc_grad_hooks(parameter, std::make_unique<Hook>(expected, observer, position));
}

GradientHook::~GradientHook() {
  if (parameter_.defined()) impl::set_post_acc_grad_hooks(parameter_, nullptr);
}

}  // namespace lockstep
