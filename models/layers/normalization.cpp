#include "lockstep/models/normalization.h"

#include <cmath>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lockstep/core/check.h"
#include "lockstep/kernels/norm.h"
#include "lockstep/models/input_check.h"

namespace lockstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// (x, residual or nothing, weight, bias or nothing) -> (their sum, its rows normalized)
struct NormFunction : torch::autograd::Function<NormFunction> {
  static variable_list forward(AutogradContext* context, const at::Tensor& x,
                               const std::optional<at::Tensor>& residual, const at::Tensor& weight,
                               const std::optional<at::Tensor>& bias, double epsilon) {
    const auto kind = bias ? kernels::NormKind::layer : kernels::NormKind::rms;
    const kernels::NormResult result = kernels::norm_forward(
        kind, x, residual.value_or(at::Tensor()), weight, bias.value_or(at::Tensor()), epsilon);
    context->set_materialize_grads(false);
    context->save_for_backward({result.sum, weight, result.mean, result.root});
    context->saved_data["adds"] = residual.has_value();
    return {result.sum, result.normalized};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require<UsageError>(!at::GradMode::is_enabled(),
                        "norm: found backward with create_graph, allowed: without; there is no "
                        "second derivative");
    const at::Tensor &of_sum = grads[0], &of_normalized = grads[1];
    const bool adds = context->saved_data["adds"].toBool();
    if (!of_normalized.defined()) return {of_sum, adds ? of_sum : at::Tensor(), {}, {}, {}};
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& weight = saved[1];
    kernels::NormResult forward;
    forward.sum = saved[0];
    forward.mean = saved[2];
    forward.root = saved[3];
    const bool centred = forward.mean.defined();
    const size_t edge = adds ? 2 : 1;  // that of the weight; absent inputs have no edge
    const bool trained =
        context->needs_input_grad(edge) || (centred && context->needs_input_grad(edge + 1));
    const kernels::NormGradients found =
        kernels::norm_backward(centred ? kernels::NormKind::layer : kernels::NormKind::rms,
                               of_normalized, of_sum, forward, weight, trained);
    const auto narrowed = [&](const at::Tensor& gradient) {
      const bool differs = gradient.defined() && gradient.scalar_type() != weight.scalar_type();
      return differs ? gradient.to(weight.scalar_type()) : gradient;
    };
    return {found.input,
            adds ? found.input : at::Tensor(),
            narrowed(found.weight),
            narrowed(found.bias),
            {}};
  }
};

}  // namespace

Norm::Norm(const ParallelContext& context, const ModuleSpec& spec, double epsilon)
    : epsilon_(epsilon), label_(context.label()) {
  require<UsageError>(std::isfinite(epsilon) && epsilon >= 0,
                      "{}: epsilon: found {}, allowed: a finite number >= 0", label_, epsilon);
  weight_ = add(spec.at("weight"), context.origin());
  if (const ParamSpec* bias = spec.find("bias")) bias_ = add(*bias, context.origin());
}

Norm::Norm(const ParallelContext& context, int64_t width, Normalization kind, double epsilon)
    : Norm(context, norm_params(width, kind, context.replicated_gradient_state()), epsilon) {}

Norm::Norm(const LayerContext& context, const ModuleSpec& spec)
    : Norm(context, spec, context.config.layernorm_epsilon) {}

Norm::Norm(const LayerContext& context) : Norm(context, norm_params(context.settings())) {}

at::Tensor Norm::forward(const at::Tensor& input) const { return beside(input).normalized; }

Norm::Branches Norm::beside(const at::Tensor& input) const {
  const Branches branches = run(input, std::nullopt);
  return at::GradMode::is_enabled() ? branches : Branches{input, branches.normalized};
}

Norm::Branches Norm::of_sum(const at::Tensor& input, const at::Tensor& residual) const {
  check_normalized(input, weight_, label_);
  require<UsageError>(residual.defined() && residual.sizes() == input.sizes() &&
                          residual.scalar_type() == input.scalar_type(),
                      "{}: found a residual {}, allowed: {}, as of the input", label_,
                      form_of(residual), form_of(input));
  return run(input, residual);
}

Norm::Branches Norm::run(const at::Tensor& input, const std::optional<at::Tensor>& residual) const {
  check_normalized(input, weight_, label_);
  const auto bias = bias_.defined() ? std::optional(bias_) : std::nullopt;
  const variable_list results = NormFunction::apply(input, residual, weight_, bias, epsilon_);
  return {results[0], results[1]};
}

}  // namespace lockstep
