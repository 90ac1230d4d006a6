#include "lockstep/models/weight_gradient.h"

#include <algorithm>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "lockstep/core/narrow_dtype.h"
#include "lockstep/core/planned_cpu.h"
#include "lockstep/kernels/matrix_product.h"

namespace lockstep {
namespace {

constexpr int64_t kWidenedTokens = 256;

/// Adds rows^T x of narrow operands to an fp32 `matrix`. Libtorch has a product for this on CUDA,
/// which the meta device represents; elsewhere a few tokens at a time are widened.
void add_widened(at::Tensor matrix, const at::Tensor& rows, const at::Tensor& x) {
  if (rows.is_cuda() || (rows.is_meta() && !plans_cpu())) {
    at::addmm_out(matrix, matrix, rows.t(), x, at::kFloat);
    return;
  }
  for (int64_t first = 0; first < rows.size(0); first += kWidenedTokens) {
    const int64_t count = std::min(kWidenedTokens, rows.size(0) - first);
    const auto widened = [&](const at::Tensor& all) {
      return all.narrow(0, first, count).to(at::kFloat);
    };
    kernels::add_product(matrix, widened(rows).t(), widened(x));
  }
}

/// By a wrapper, and by no hook of the tensor before it.
bool is_awaited(const at::Tensor& weight) {
  return torch::autograd::impl::post_acc_grad_hooks(weight) &&
         torch::autograd::impl::hooks(weight).empty();
}

}  // namespace

at::Tensor as_matrix(const at::Tensor& x) {
  return x.reshape({c10::multiply_integers(x.sizes().slice(0, x.dim() - 1)), x.size(-1)});
}

at::Tensor weight_gradient(const at::Tensor& weight, const at::Tensor& rows, const at::Tensor& x) {
  return kernels::product(rows.t(), x).view(weight.sizes());
}

bool is_awaited_in_grad(const at::Tensor& weight) {
  return is_awaited(weight) && weight.grad().defined();
}

at::Tensor zeros_in_place_of_grad(const at::Tensor& weight) {
  const bool on_cpu = weight.is_cpu() || (weight.is_meta() && plans_cpu());
  const bool stands_in =
      is_awaited(weight) && !weight.grad().defined() && on_cpu && !is_narrow(weight.scalar_type());
  return stands_in ? at::zeros(weight.sizes(), weight.options()) : at::Tensor();
}

bool add_to_gradient(const at::Tensor& grad, const at::Tensor& rows, const at::Tensor& x) {
  if (!grad.is_contiguous()) return false;
  const at::Tensor matrix = grad.view({-1, grad.size(-1)});
  if (grad.scalar_type() == rows.scalar_type())
    kernels::add_product(matrix, rows.t(), x);
  else if (grad.scalar_type() == at::kFloat && is_narrow(rows.scalar_type()))
    add_widened(matrix, rows, x);
  else
    return false;
  return true;
}

bool add_weight_gradient(const at::Tensor& weight, const at::Tensor& rows, const at::Tensor& x) {
  return is_awaited_in_grad(weight) && add_to_gradient(weight.grad(), rows, x);
}

bool is_capturing() {
  const auto* const info = torch::autograd::get_current_graph_task_exec_info();
  return info && !info->empty() && !CapturesAccumulate::any();
}

OuterBackward outer_backward() {
  OuterBackward outer = CapturesAccumulate::outer().value_or(OuterBackward());
  if (outer.pass < 0) outer.pass = torch::autograd::get_current_graph_task_id();
  return outer;
}

bool is_captured(uint32_t index) {
  if (!is_capturing()) return false;
  const auto* const info = torch::autograd::get_current_graph_task_exec_info();
  const auto found =
      info->find(torch::autograd::get_current_node()->next_edge(index).function.get());
  return found != info->end() && found->second.captures_;
}

}  // namespace lockstep
