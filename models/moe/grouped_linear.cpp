#include "lockstep/models/grouped_linear.h"

#include <numeric>
#include <utility>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lockstep/core/check.h"
#include "lockstep/models/fp8_experts.h"

namespace lockstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void hold_groups(AutogradContext* context, const RowGroupsPtr& groups) {
  context->saved_data["groups"] = c10::IValue::make_capsule(groups);
}

const kernels::RowGroups& held_groups(const c10::intrusive_ptr<torch::CustomClassHolder>& capsule) {
  return static_cast<const kernels::RowGroups&>(*capsule);
}

void forbid_second_derivative(const char* function) {
  require<UsageError>(!at::GradMode::is_enabled(),
                      "{}: found backward with create_graph, allowed: without; there is no second "
                      "derivative",
                      function);
}

/// What a product needs besides tensors.
struct GroupedCall : torch::CustomClassHolder {
  GroupedCall(RowGroupsPtr g, std::shared_ptr<const Fp8Layer> f)
      : groups(std::move(g)), fp8(std::move(f)), notes_largest(at::GradMode::is_enabled()) {}
  RowGroupsPtr groups;
  std::shared_ptr<const Fp8Layer> fp8;
  bool notes_largest;  ///< the operands count for the scales of fp8
};

struct GroupedLinear : torch::autograd::Function<GroupedLinear> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const at::Tensor& weight, const c10::intrusive_ptr<GroupedCall>& call) {
    context->save_for_backward({input, weight});
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    if (call->fp8)
      return fp8_grouped_rows(*call->fp8, input, weight.alias(), *call->groups,
                              call->notes_largest);
    return kernels::grouped_rows(input, weight.transpose(1, 2), *call->groups);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    forbid_second_derivative("grouped_linear");
    const variable_list saved = context->get_saved_variables();
    const auto capsule = context->saved_data["call"].toCapsule();
    const auto& call = static_cast<const GroupedCall&>(*capsule);
    const bool of_input = context->needs_input_grad(0), of_weight = context->needs_input_grad(1);
    const at::Tensor grad = grads[0].contiguous();
    const at::Tensor weight = of_input ? saved[1].alias() : saved[1];
    const GroupedGradients gradients =
        call.fp8 ? fp8_grouped_gradients(*call.fp8, grad, saved[0], weight, *call.groups,
                                         {of_input, of_weight})
                 : GroupedGradients{
                       of_input ? kernels::grouped_rows(grad, weight, *call.groups) : at::Tensor(),
                       of_weight ? kernels::grouped_matrices(grad, saved[0], *call.groups)
                                 : at::Tensor()};
    return {gradients.of_input, gradients.of_weight, {}};
  }
};

struct AddExpertBias : torch::autograd::Function<AddExpertBias> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& bias,
                            const RowGroupsPtr& groups) {
    hold_groups(context, groups);
    const at::Tensor expert =
        kernels::group_of_rows(*groups, x.size(0)).clamp_max(groups->size() - 1);
    return x + bias.index_select(0, expert);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    forbid_second_derivative("add_expert_bias");
    const auto capsule = context->saved_data["groups"].toCapsule();
    at::Tensor of_bias;
    if (context->needs_input_grad(1))
      of_bias = kernels::grouped_sums(grads[0].contiguous(), held_groups(capsule));
    return {grads[0], of_bias, {}};
  }
};

bool has_rows(const at::Tensor& input, const kernels::RowGroups& groups) {
  if (!input.is_cpu()) return true;  // The host does not know.
  const std::vector<int64_t>& rows = groups.rows_on_host();
  return std::accumulate(rows.begin(), rows.end(), int64_t{0}) <= input.size(0);
}

}  // namespace

at::Tensor grouped_linear(const at::Tensor& input, const at::Tensor& weight,
                          const RowGroupsPtr& groups, const std::shared_ptr<const Fp8Layer>& fp8) {
  require<UsageError>(
      input.dim() == 2 && weight.dim() == 3 && input.size(1) == weight.size(2) &&
          groups->size() == weight.size(0) && has_rows(input, *groups),
      "grouped_linear: found input {} and weight {} for {} experts, allowed: [rows, in] and "
      "[experts, out, in], the experts' rows among those of the input",
      fmt::join(input.sizes(), " x "), fmt::join(weight.sizes(), " x "), groups->size());
  return GroupedLinear::apply(input.contiguous(), weight,
                              c10::make_intrusive<GroupedCall>(groups, fp8));
}

at::Tensor add_expert_bias(const at::Tensor& x, const at::Tensor& bias,
                           const RowGroupsPtr& groups) {
  return AddExpertBias::apply(x, bias, groups);
}

}  // namespace lockstep
