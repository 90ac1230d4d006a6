#include "lockstep/models/layers/recompute.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Recompute : torch::autograd::Function<Recompute> {
  /// `anchor` requires a gradient, so that backward comes here even where no input does.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& anchor,
                            const std::shared_ptr<const RecomputedFunction>& function,
                            at::TensorList inputs) {
    (void)anchor;
    context->save_for_backward(inputs.vec());
    context->saved_data["function"] =
        c10::IValue::make_capsule(c10::make_intrusive<Holder>(function));
    return (*function)(inputs.vec());
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require<UsageError>(!at::GradMode::is_enabled(),
                        "recompute: found backward with create_graph, allowed: without; there is "
                        "no second derivative");
    const variable_list saved = context->get_saved_variables();
    variable_list inputs;
    for (const at::Tensor& tensor : saved)
      inputs.push_back(tensor.detach().requires_grad_(tensor.requires_grad()));
    const auto holder = context->saved_data["function"].toCapsule();
    at::Tensor output;
    {
      const at::AutoGradMode enable(true);
      output = (*static_cast<Holder&>(*holder).function)(inputs);
    }
    torch::autograd::backward({output}, {grads[0]});
    variable_list result = {at::Tensor(), at::Tensor()};
    for (const at::Tensor& input : inputs) result.push_back(input.grad());
    return result;
  }

  struct Holder : torch::CustomClassHolder {
    explicit Holder(std::shared_ptr<const RecomputedFunction> f) : function(std::move(f)) {}
    std::shared_ptr<const RecomputedFunction> function;
  };
};

}  // namespace

at::Tensor recompute(const RecomputedFunction& function, const std::vector<at::Tensor>& inputs) {
  if (!at::GradMode::is_enabled()) return function(inputs);
  const at::Tensor anchor = at::empty({0}).requires_grad_(true);
  return Recompute::apply(anchor, std::make_shared<const RecomputedFunction>(function),
                          at::TensorList(inputs));
}

}  // namespace lockstep
