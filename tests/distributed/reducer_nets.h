#pragma once

#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lockstep/core/parameters.h"
#include "lockstep/distributed/reducer.h"
#include "lockstep/tests/support/rank_threads.h"

/// Helpers that the tests of the Reducer share.
namespace lockstep::testing {

/// Parameters "p0", "p1", ... that require a gradient.
inline std::vector<NamedParameter> named(const std::vector<at::Tensor>& tensors) {
  std::vector<NamedParameter> result;
  for (const at::Tensor& tensor : tensors) {
    at::Tensor leaf = tensor.detach().requires_grad_(true);
    result.push_back({"p" + std::to_string(result.size()), leaf, default_description(leaf)});
  }
  return result;
}

/// fp32 zeros of the given numbers of elements.
inline std::vector<NamedParameter> named_zeros(const std::vector<int64_t>& numels) {
  std::vector<at::Tensor> tensors;
  for (const int64_t numel : numels) tensors.push_back(at::zeros({numel}));
  return named(tensors);
}

inline ProcessGroup replicas(const ParallelState& state) { return state.group(GroupKind::dp_cp); }

/// The sum over the parameters in `used` of coefficient * parameter: its gradient is the
/// coefficient.
inline at::Tensor linear_loss(const std::vector<NamedParameter>& params,
                              const std::vector<size_t>& used, double coefficient) {
  at::Tensor loss = at::zeros({}, at::kDouble);
  for (const size_t p : used) loss = loss + (params[p].tensor * coefficient).to(at::kDouble).sum();
  return loss;
}

/// Prepares an iteration for `loss` and runs its backward.
inline void reduce(Reducer& reducer, const std::function<at::Tensor()>& loss) {
  reducer.prepare_for_forward();
  const at::Tensor value = loss();
  reducer.prepare_for_backward({value});
  value.backward();
}

inline bool all_equal_to(const at::Tensor& tensor, double value) {
  return tensor.defined() && at::equal(tensor, at::full_like(tensor, value));
}

/// x * p, recomputed in a nested backward, so the graph hides `p`.
struct Recomputed : torch::autograd::Function<Recomputed> {
  /// `p` is a pointer because a tensor would become part of the graph.
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor* p) {
    context->save_for_backward({x.detach()});
    context->saved_data["p"] = *p;
    const at::NoGradGuard no_grad;
    return x * context->saved_data["p"].toTensor();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_(true);
    at::Tensor y;
    {
      const at::AutoGradMode enable(true);
      y = x * context->saved_data["p"].toTensor();
    }
    torch::autograd::backward({y}, {grads[0]});
    return {x.grad(), at::Tensor()};
  }
};

/// Passes `x` on; its gradient is undefined.
struct NoGradient : torch::autograd::Function<NoGradient> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    return {at::Tensor()};
  }
};

}  // namespace lockstep::testing
