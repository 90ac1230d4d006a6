#include "lockstep/models/grouped_linear.h"

#include <numeric>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Calls visit(expert, first row, rows) for the experts that have rows.
template <class Visit>
void for_experts(at::IntArrayRef rows, Visit visit) {
  int64_t first = 0;
  for (size_t e = 0; e < rows.size(); ++e) {
    if (rows[e] > 0) visit(static_cast<int64_t>(e), first, rows[e]);
    first += rows[e];
  }
}

struct GroupedLinear : torch::autograd::Function<GroupedLinear> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const at::Tensor& weight, const std::vector<int64_t>& rows) {
    context->save_for_backward({input, weight});
    context->saved_data["rows"] = rows;
    at::Tensor output = at::empty({input.size(0), weight.size(1)}, input.options());
    for_experts(rows, [&](int64_t e, int64_t first, int64_t count) {
      at::Tensor part = output.narrow(0, first, count);
      at::mm_out(part, input.narrow(0, first, count), weight[e].t());
    });
    return output;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require<UsageError>(!at::GradMode::is_enabled(),
                        "grouped_linear: found backward with create_graph, allowed: without; there "
                        "is no second derivative");
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &input = saved[0], &weight = saved[1];
    const at::Tensor grad = grads[0].contiguous();
    at::Tensor of_input, of_weight;
    if (context->needs_input_grad(0)) of_input = at::empty(input.sizes(), input.options());
    if (context->needs_input_grad(1)) of_weight = at::zeros(weight.sizes(), weight.options());
    for_experts(context->saved_data["rows"].toIntVector(),
                [&](int64_t e, int64_t first, int64_t count) {
                  const at::Tensor part = grad.narrow(0, first, count);
                  if (of_input.defined()) {
                    at::Tensor rows = of_input.narrow(0, first, count);
                    at::mm_out(rows, part, weight[e]);
                  }
                  if (of_weight.defined()) {
                    at::Tensor matrix = of_weight[e];
                    at::mm_out(matrix, part.t(), input.narrow(0, first, count));
                  }
                });
    return {of_input, of_weight, {}};
  }
};

bool fits_one_launch(const at::Tensor& input, const at::Tensor& weight) {
  return input.is_cuda() && input.scalar_type() == at::kBFloat16 && weight.size(1) % 8 == 0 &&
         weight.size(2) % 8 == 0 && input.size(0) > 0;
}

}  // namespace

at::Tensor grouped_linear(const at::Tensor& input, const at::Tensor& weight,
                          const std::vector<int64_t>& rows) {
  require<UsageError>(
      input.dim() == 2 && weight.dim() == 3 && input.size(1) == weight.size(2) &&
          static_cast<int64_t>(rows.size()) == weight.size(0) &&
          std::accumulate(rows.begin(), rows.end(), int64_t{0}) == input.size(0),
      "grouped_linear: found input {} and weight {} for {} experts, allowed: [rows, in] and "
      "[experts, out, in], the experts' rows adding up to those of the input",
      fmt::join(input.sizes(), " x "), fmt::join(weight.sizes(), " x "), rows.size());
  if (!fits_one_launch(input, weight))
    return GroupedLinear::apply(input.contiguous(), weight, rows);
  std::vector<int32_t> ends(rows.size());
  std::partial_sum(rows.begin(), rows.end(), ends.begin());
  return at::_grouped_mm(input.contiguous(), weight.transpose(1, 2),
                         at::tensor(ends, at::kInt).to(input.device()));
}

}  // namespace lockstep
