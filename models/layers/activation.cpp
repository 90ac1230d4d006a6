#include "lockstep/models/activation.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lockstep/core/check.h"
#include "lockstep/kernels/swiglu.h"

namespace lockstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct SwigluFunction : torch::autograd::Function<SwigluFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& inner) {
    context->save_for_backward({inner});
    return kernels::swiglu(inner);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require<UsageError>(!at::GradMode::is_enabled(),
                        "swiglu: found backward with create_graph, allowed: without; there is no "
                        "second derivative");
    return {kernels::swiglu_backward(grads[0], context->get_saved_variables()[0])};
  }
};

}  // namespace

at::Tensor activate(Activation activation, const at::Tensor& inner) {
  if (activation == Activation::swiglu) return SwigluFunction::apply(inner);
  return at::gelu(inner, activation == Activation::gelu_tanh ? "tanh" : "none");
}

}  // namespace lockstep
