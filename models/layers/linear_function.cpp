#include "lockstep/models/linear_function.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "lockstep/core/check.h"
#include "lockstep/kernels/matrix_product.h"
#include "lockstep/models/fp8_scaling.h"
#include "lockstep/models/gathering.h"
#include "lockstep/models/input_check.h"
#include "lockstep/models/overlapped_product.h"
#include "lockstep/models/recompute.h"
#include "lockstep/models/weight_gradient.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/parallel_state/parallel_functions.h"

namespace lockstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// The data that backward needs in addition to tensors of the graph.
struct LinearCall : torch::CustomClassHolder {
  LinearCall(const ParallelLinearOptions& o, at::Tensor w)
      : options(o), weight(std::move(w)), notes_largest(at::GradMode::is_enabled()) {}
  ParallelLinearOptions options;
  /// Set if the weight stays out of the graph, because its gradient may come after backward:
  /// autograd would call the parameter's hook in backward even if it got no gradient.
  at::Tensor weight;
  bool notes_largest;  ///< the operands count for the scales of options.fp8
};

at::Tensor product(const at::Tensor& x, const at::Tensor& matrix,
                   const std::optional<at::Tensor>& bias, const LinearCall& call) {
  const auto& fp8 = call.options.fp8;
  if (!fp8) return kernels::linear_product(x, matrix, bias);
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = matrix.size(0);
  return fp8->output(as_matrix(x), matrix, bias, call.notes_largest).view(shape);
}

/// The gradient [tokens, out] of a layer's output, and the gradients that follow from it.
class OutputGradient {
 public:
  /// `of_weight_wanted`: of_weight() or add_of_weight() will be called.
  OutputGradient(const at::Tensor& grad, const ParallelLinearOptions& options,
                 bool of_weight_wanted)
      : rows_(as_matrix(grad)), fp8_(options.fp8) {
    if (fp8_) narrowed_ = fp8_->narrowed(rows_, of_weight_wanted);
  }

  at::Tensor of_input(const at::Tensor& matrix) const {
    return fp8_ ? fp8_->input_gradient(narrowed_, matrix, rows_.scalar_type())
                : kernels::product(rows_, matrix);
  }
  /// `whole`: the weight has no other gradient, so that add_of_weight() may take this one later.
  at::Tensor of_weight(const at::Tensor& weight, const at::Tensor& x, bool whole) const {
    if (fp8_) return fp8_->weight_gradient(narrowed_, x, weight.scalar_type()).view(weight.sizes());
    const at::Tensor sum = whole ? zeros_in_place_of_grad(weight) : at::Tensor();
    if (sum.defined() && add_to_gradient(sum, rows_, x)) return sum;
    return weight_gradient(weight, rows_, x);
  }
  /// See add_weight_gradient().
  bool add_of_weight(const at::Tensor& weight, const at::Tensor& x) const {
    if (!fp8_) return add_weight_gradient(weight, rows_, x);
    if (!is_awaited_in_grad(weight)) return false;
    at::Tensor& grad = weight.mutable_grad();
    grad.add_(fp8_->weight_gradient(narrowed_, x, grad.scalar_type()).view(grad.sizes()));
    return true;
  }
  at::Tensor of_bias() const { return rows_.sum(0); }

 private:
  at::Tensor rows_;
  std::shared_ptr<const Fp8Layer> fp8_;
  kernels::Fp8Matrices narrowed_;
};

/// Notes that the running backward uses a weight whose gradient is accumulated here.
void note_use(const at::Tensor& weight, const ParallelLinearOptions& options) {
  const OuterBackward outer = outer_backward();
  require<UsageError>(!outer.in_parts,
                      "{}: found a backward in two parts (SplitBackward), allowed with deferred "
                      "weight gradients: a whole one; pass the model's `deferred` to "
                      "PipelineExecutorOptions",
                      options.label.layer());
  if (!torch::autograd::impl::post_acc_grad_hooks(weight) &&
      torch::autograd::impl::hooks(weight).empty())
    return;
  require<UsageError>(options.deferred->note_use(weight.unsafeGetTensorImpl(), outer.pass),
                      "{}: its weight was used twice in one forward, allowed with deferred weight "
                      "gradients: once; make a layer for each use, or this one in a context whose "
                      "`deferred` is null",
                      options.label.layer());
}

/// If the weight has other uses, autograd adds up all gradients first, unless the buffer is wider
/// than they are.
bool adds_in_place(const ParallelLinearOptions& options, const at::Tensor& weight) {
  const at::Tensor& grad = weight.grad();
  return options.weight_used_once || (grad.defined() && grad.scalar_type() != weight.scalar_type());
}

/// Does the same as autograd at a leaf: the tensor's hooks get the gradient first, and what a hook
/// may have kept is copied.
void accumulate(const at::Tensor& weight, const OutputGradient& output, const at::Tensor& x) {
  if (!output.add_of_weight(weight, x)) {
    at::Tensor gradient = output.of_weight(weight, x, /*whole=*/true);
    const auto& hooks = torch::autograd::impl::hooks(weight);
    for (const auto& hook : hooks) gradient = (*hook)({gradient}).front();
    if (weight.grad().defined())
      weight.mutable_grad().add_(gradient);
    else
      weight.mutable_grad() =
          hooks.empty() ? gradient : gradient.detach().clone(at::MemoryFormat::Contiguous);
  }
  if (const auto& hook = torch::autograd::impl::post_acc_grad_hooks(weight)) (*hook)(weight);
}

struct LinearFunction : torch::autograd::Function<LinearFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                            const c10::intrusive_ptr<LinearCall>& call) {
    const ParallelLinearOptions& options = call->options;
    const bool trained = call->weight.defined() || weight.requires_grad();
    context->save_for_backward({trained ? input : at::Tensor(), weight});
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    context->saved_data["biased"] = bias.has_value();
    const at::Tensor matrix = weight.flatten(0, -2);
    const ProductFactor factor = {matrix, bias, call->notes_largest};
    if (options.output != LinearOutput::own) return summed_product(input, factor, options);
    if (options.input != LinearInput::sequence_chunk) return product(input, matrix, bias, *call);
    if (options.overlap) return gathered_product(input, factor, options);
    Gathering gathering(input, options, options.label.input());
    gathering.work.wait();
    return product(gathering.whole, matrix, bias, *call);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto capsule = context->saved_data["call"].toCapsule();
    const auto& call = static_cast<const LinearCall&>(*capsule);
    const ParallelLinearOptions& options = call.options;
    require<UsageError>(!at::GradMode::is_enabled(),
                        "{}: found backward with create_graph, allowed: without; there is no "
                        "second derivative",
                        options.label.layer());
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &input = saved[0], &weight = saved[1];
    const bool apart = call.weight.defined();
    const bool accumulates = apart && !is_capturing();
    const bool later = accumulates && options.deferred->deferring();
    const bool weight_now = apart ? accumulates && !later : context->needs_input_grad(1);
    if (accumulates) note_use(call.weight, options);

    std::optional<Gathering> gathering;
    if (options.input == LinearInput::sequence_chunk && weight_now)
      gathering.emplace(input, options, options.label.input_again());
    const at::Tensor grad = whole_gradient(grads[0], options);
    const OutputGradient output(grad, options, weight_now || later);
    at::Tensor input_gradient;
    Work reduction;
    if (context->needs_input_grad(0))
      reduction = start_input_gradient(grad, output, weight, options, input_gradient);

    at::Tensor own_gradient;
    if (later) defer(input, call.weight, output, options);
    if (weight_now) {
      if (gathering) gathering->work.wait();
      const at::Tensor x = as_matrix(gathering ? gathering->whole : input);
      if (apart)
        accumulate(call.weight, output, x);
      else if (!adds_in_place(options, weight) || is_captured(1) ||
               !output.add_of_weight(weight, x))
        own_gradient = output.of_weight(weight, x, options.weight_used_once);
    }
    const bool biased = context->saved_data["biased"].toBool() && context->needs_input_grad(2);
    const at::Tensor bias_gradient = biased ? output.of_bias() : at::Tensor();
    reduction.wait();
    return {input_gradient, own_gradient, bias_gradient, {}};
  }

 private:
  /// The gradient of this rank's term of the output.
  static at::Tensor whole_gradient(const at::Tensor& grad, const ParallelLinearOptions& options) {
    if (options.output != LinearOutput::sequence_chunk) return grad;
    Gathering gathering(grad, options, options.label.output_gradient());
    gathering.work.wait();
    return gathering.whole;
  }

  /// Computes this rank's term and starts adding up the terms of all ranks.
  static Work start_input_gradient(const at::Tensor& grad, const OutputGradient& output,
                                   const at::Tensor& weight, const ParallelLinearOptions& options,
                                   at::Tensor& result) {
    std::vector<int64_t> shape = grad.sizes().vec();
    shape.back() = weight.size(-1);
    const at::Tensor term = output.of_input(weight.flatten(0, -2)).view(shape);
    result = term;
    if (options.input == LinearInput::own) return {};
    if (options.input == LinearInput::copied)
      return all_reduce(options.group, term, ReduceOp::sum, options.label.input_gradient());
    shape[0] /= options.group.size();
    result = at::empty(shape, term.options());
    return reduce_scatter(options.group, result, term, ReduceOp::sum,
                          options.label.input_gradient());
  }

  static void defer(const at::Tensor& input, const at::Tensor& weight, const OutputGradient& output,
                    const ParallelLinearOptions& options) {
    options.deferred->add([=, outer = outer_backward()] {
      const CapturesAccumulate belongs(outer);
      if (options.input != LinearInput::sequence_chunk)
        return accumulate(weight, output, as_matrix(input.detach()));
      Gathering gathering(input, options, options.label.input_again());
      gathering.work.wait();
      accumulate(weight, output, as_matrix(gathering.whole));
    });
  }
};

/// parallel_linear() for checked operands.
at::Tensor apply(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                 const ParallelLinearOptions& options) {
  const auto row_bias = bias.defined() ? std::optional(bias.flatten()) : std::nullopt;
  const bool may_defer = options.deferred && options.weight_used_once && weight.requires_grad();
  const bool apart = may_defer && input.requires_grad() && at::GradMode::is_enabled();
  if (may_defer && !at::GradMode::is_enabled()) leave_out_of_recompute(weight);
  auto call = c10::make_intrusive<LinearCall>(options, apart ? weight : at::Tensor());
  return LinearFunction::apply(input, apart ? weight.detach() : weight, row_bias, call);
}

at::Tensor summed(const at::Tensor& term, const ParallelLinearOptions& options) {
  const std::string& label = options.label.output();
  return options.output == LinearOutput::summed
             ? reduce_from_group(term, options.group, label)
             : reduce_scatter_to_group(term, options.group, 0, label);
}

/// Checks the weight and the bias.
void check_parameters(const at::Tensor& weight, const at::Tensor& bias, const std::string& label) {
  require<UsageError>(
      weight.defined() && weight.dim() >= 2 && at::isFloatingType(weight.scalar_type()),
      "{}: found a weight {}, allowed: [out..., in] of a floating-point dtype", label,
      form_of(weight));
  if (!bias.defined()) return;
  const int64_t out = c10::multiply_integers(weight.sizes().slice(0, weight.dim() - 1));
  require<UsageError>(bias.numel() == out && bias.scalar_type() == weight.scalar_type(),
                      "{}: found a bias {}, allowed: {} elements of {}", label, form_of(bias), out,
                      at::toString(weight.scalar_type()));
}

}  // namespace

at::Tensor parallel_linear(const at::Tensor& input, const at::Tensor& weight,
                           const at::Tensor& bias, const ParallelLinearOptions& options) {
  check_parameters(weight, bias, options.label.layer());
  const bool gathers = options.input == LinearInput::sequence_chunk;
  const bool sums = options.output != LinearOutput::own, alone = options.group.size() == 1;
  require<UsageError>(!gathers || !sums,
                      "{}: found an input that is gathered and an output that is summed, allowed: "
                      "one of the two",
                      options.label.layer());
  check_input(input, weight.size(-1), weight, options.label.layer(), !alone && gathers ? 2 : 1);
  require<UsageError>(
      alone || options.output != LinearOutput::sequence_chunk || input.dim() > 1,
      "{}: found an input {}, allowed: [sequence, ..., {}], because its output is cut along the "
      "sequence",
      options.label.layer(), form_of(input), weight.size(-1));
  ParallelLinearOptions local = options;
  local.overlap = options.overlap && input.dim() > 1 &&  // a single position is not cut
                  (!options.fp8 || options.fp8->scales_parts());
  if (alone) local.input = LinearInput::own;
  if (alone || !local.overlap) local.output = LinearOutput::own;
  if (alone || !sums) return apply(input, weight, bias, local);
  const at::Tensor result = apply(input, weight, {}, local);
  const at::Tensor sum = local.overlap ? result : summed(result, options);
  return bias.defined() ? sum + bias.flatten() : sum;
}

}  // namespace lockstep
