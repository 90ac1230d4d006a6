#include "lockstep/models/layers/recompute.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Keeps the inputs of a function for backward, whole or this rank's part.
struct Call : torch::CustomClassHolder {
  explicit Call(RecomputedFunction f) : function(std::move(f)) {}

  variable_list keep(at::TensorList inputs) {
    variable_list kept;
    for (const at::Tensor& input : inputs) {
      needs_gradient.push_back(input.requires_grad());
      sizes.push_back(input.sizes().vec());
      kept.push_back(group ? part_of(input) : input);
    }
    return kept;
  }

  variable_list restore(const variable_list& kept) const {
    variable_list inputs;
    for (size_t i = 0; i < kept.size(); ++i)
      inputs.push_back((group ? gathered(kept[i], sizes[i]) : kept[i].detach())
                           .requires_grad_(needs_gradient[i]));
    return inputs;
  }

  RecomputedFunction function;
  std::optional<ProcessGroup> group;
  std::string label;

 private:
  at::Tensor part_of(const at::Tensor& input) const {
    require<UsageError>(input.numel() % group->size() == 0,
                        "{}: found {} elements, allowed: a multiple of the {} ranks of group {}",
                        label, input.numel(), group->size(), group->to_string());
    const int64_t part = input.numel() / group->size();
    return input.detach().reshape({-1}).narrow(0, group->rank() * part, part).clone();
  }

  at::Tensor gathered(const at::Tensor& part, const std::vector<int64_t>& whole_sizes) const {
    const at::Tensor whole = at::empty(whole_sizes, part.options());
    all_gather(*group, whole, part, "saved " + label).wait();
    return whole;
  }

  std::vector<bool> needs_gradient;
  std::vector<std::vector<int64_t>> sizes;
};

struct Recompute : torch::autograd::Function<Recompute> {
  /// `anchor` requires a gradient, so that backward comes here even where no input does.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& anchor,
                            const c10::intrusive_ptr<Call>& call, at::TensorList inputs) {
    (void)anchor;
    context->save_for_backward(call->keep(inputs));
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    return call->function(inputs.vec());
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require<UsageError>(!at::GradMode::is_enabled(),
                        "recompute: found backward with create_graph, allowed: without; there is "
                        "no second derivative");
    const auto capsule = context->saved_data["call"].toCapsule();
    const auto& call = static_cast<const Call&>(*capsule);
    const variable_list inputs = call.restore(context->get_saved_variables());
    at::Tensor output;
    {
      const at::AutoGradMode enable(true);
      output = call.function(inputs);
    }
    torch::autograd::backward({output}, {grads[0]});
    variable_list result = {at::Tensor(), at::Tensor()};
    for (const at::Tensor& input : inputs) result.push_back(input.grad());
    return result;
  }
};

at::Tensor run_and_keep(const c10::intrusive_ptr<Call>& call,
                        const std::vector<at::Tensor>& inputs) {
  const at::Tensor anchor = at::empty({0}).requires_grad_(true);
  return Recompute::apply(anchor, call, at::TensorList(inputs));
}

}  // namespace

at::Tensor recompute(const RecomputedFunction& function, const std::vector<at::Tensor>& inputs) {
  if (!at::GradMode::is_enabled()) return function(inputs);
  return run_and_keep(c10::make_intrusive<Call>(function), inputs);
}

at::Tensor recompute_from_parts(const RecomputedFunction& function,
                                const std::vector<at::Tensor>& inputs, const ProcessGroup& group,
                                const std::string& label) {
  if (!at::GradMode::is_enabled()) return function(inputs);
  auto call = c10::make_intrusive<Call>(function);
  if (group.size() > 1) call->group = group;
  call->label = label;
  return run_and_keep(call, inputs);
}

}  // namespace lockstep
