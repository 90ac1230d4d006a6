#include "lockstep/models/recompute.h"

#include <algorithm>
#include <optional>
#include <unordered_set>

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "lockstep/core/check.h"
#include "lockstep/core/gradient_capture.h"
#include "lockstep/models/activation_offload.h"
#include "lockstep/models/weight_gradient.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

bool holds(at::TensorList tensors, const at::Tensor& one) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [&](const at::Tensor& tensor) { return tensor.is_same(one); });
}

class ParameterWatch;
thread_local ParameterWatch* current_watch = nullptr;

/// Finds the parameters that a function without a graph uses: the leaf tensors that require a
/// gradient among the arguments of libtorch's operators on this thread. A view made without a graph
/// looks like such a leaf too, and would hold its memory until the whole backward ends.
class ParameterWatch {
 public:
  ParameterWatch()
      : handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(on_operator)
                                               .needsInputs(true)
                                               .scopes({at::RecordScope::FUNCTION}))) {
    current_watch = this;
  }
  ~ParameterWatch() {
    current_watch = nullptr;
    at::removeCallback(handle_);
  }
  ParameterWatch(const ParameterWatch&) = delete;
  ParameterWatch& operator=(const ParameterWatch&) = delete;

  void leave_out(const at::Tensor& parameter) { left_out_.push_back(parameter); }

  /// The parameters that are not among the function's inputs.
  variable_list parameters(at::TensorList inputs) {
    std::erase_if(found_, [&](const at::Tensor& leaf) {
      return holds(left_out_, leaf) || holds(inputs, leaf);
    });
    return std::move(found_);
  }

 private:
  static std::unique_ptr<at::ObserverContext> on_operator(const at::RecordFunction& call) {
    if (current_watch)
      for (const c10::IValue& argument : call.inputs()) current_watch->visit(argument);
    return nullptr;
  }

  void visit(const c10::IValue& value) {
    if (value.isList())
      for (const c10::IValue& item : value.toListRef()) visit(item);
    if (!value.isTensor()) return;
    const at::Tensor& tensor = value.toTensor();
    if (tensor.defined() && tensor.requires_grad() && tensor.is_leaf() &&
        !(tensor.is_view() && tensor._base().requires_grad()) &&
        seen_.insert(tensor.unsafeGetTensorImpl()).second)
      found_.push_back(tensor);
  }

  at::CallbackHandle handle_;
  std::unordered_set<const c10::TensorImpl*> seen_;
  variable_list found_, left_out_;
};

/// The values that a function has read, in order.
struct Readings {
  std::vector<std::vector<int64_t>> values;
  bool complete = false;
};

class ReadingScope;
thread_local ReadingScope* current_scope = nullptr;

/// While a function runs on this thread, notes its readings, or replays complete ones.
class ReadingScope {
 public:
  explicit ReadingScope(Readings& readings)
      : readings_(readings), outer_(std::exchange(current_scope, this)) {}
  ~ReadingScope() {
    current_scope = outer_;
    readings_.complete = true;
  }
  ReadingScope(const ReadingScope&) = delete;
  ReadingScope& operator=(const ReadingScope&) = delete;

  std::vector<int64_t> next(const std::function<std::vector<int64_t>()>& read) {
    if (readings_.complete) return readings_.values.at(next_++);
    return readings_.values.emplace_back(outer_ ? outer_->next(read) : read());
  }

 private:
  Readings& readings_;
  ReadingScope* const outer_;
  size_t next_ = 0;
};

/// The leaf tensors at which the graph of `value` ends, each once.
variable_list leaves_of(const at::Tensor& value) {
  variable_list leaves;
  std::unordered_set<const torch::autograd::Node*> seen;
  std::vector<torch::autograd::Node*> open = {value.grad_fn().get()};
  while (!open.empty()) {
    auto* const node = open.back();
    open.pop_back();
    if (!node || !seen.insert(node).second) continue;
    if (const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(node))
      leaves.push_back(leaf->variable);
    for (const auto& edge : node->next_edges()) open.push_back(edge.function.get());
  }
  return leaves;
}

/// While this lives, the hooks of some leaf tensors see no gradient: autograd calls them also where
/// it only captures one. Another hook takes their place, by which a layer knows that they exist.
class HooksAside {
 public:
  explicit HooksAside(at::TensorList leaves) {
    for (const at::Tensor& leaf : leaves) {
      Hooks& hooks = torch::autograd::impl::hooks(leaf);
      if (hooks.empty()) continue;
      Hooks idle;
      idle.push_back(std::make_unique<Idle>());
      aside_.emplace_back(leaf, std::exchange(hooks, std::move(idle)));
    }
  }
  ~HooksAside() {
    for (auto& [leaf, hooks] : aside_) torch::autograd::impl::hooks(leaf) = std::move(hooks);
  }
  HooksAside(const HooksAside&) = delete;
  HooksAside& operator=(const HooksAside&) = delete;

 private:
  using Hooks = std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>>;
  struct Idle : torch::autograd::FunctionPreHook {
    variable_list operator()(const variable_list& grads) override { return grads; }
  };
  std::vector<std::pair<at::Tensor, Hooks>> aside_;
};

/// Keeps the inputs of a function for backward: whole, or only this rank's part.
struct RecomputedCall : torch::CustomClassHolder {
  explicit RecomputedCall(RecomputedFunction f, ActivationOffload* to_host)
      : function(std::move(f)), offload(to_host) {}

  /// The tensors for autograd to keep: an undefined one in place of one that is offloaded.
  variable_list keep(at::TensorList inputs) {
    variable_list kept;
    for (const at::Tensor& input : inputs) {
      needs_gradient.push_back(input.requires_grad());
      sizes.push_back(input.sizes().vec());
      const at::Tensor own = group ? part_of(input) : input;
      const bool leaves = offload && offload->takes(own);
      offloaded.push_back(leaves ? offload->keep(own) : nullptr);
      kept.push_back(leaves ? at::Tensor() : own);
    }
    offload = nullptr;  // belongs to the model, which may be gone by backward
    return kept;
  }

  variable_list restore(variable_list kept) {
    // The last one was kept last; taking it fetches the one before it.
    for (size_t i = offloaded.size(); i-- > 0;)
      if (offloaded[i]) kept[i] = offloaded[i]->take();
    // Who keeps the loss keeps this call too, but there will be no other backward.
    if (!torch::autograd::get_current_graph_task_keep_graph()) offloaded.clear();
    variable_list inputs;
    for (size_t i = 0; i < kept.size(); ++i)
      inputs.push_back((group ? gathered(kept[i], sizes[i]) : kept[i].detach())
                           .requires_grad_(needs_gradient[i]));
    return inputs;
  }

  /// Returns the value; notes the parameters that it depends on.
  at::Tensor run_first(at::TensorList inputs) {
    const at::NoGradGuard no_grad;
    ParameterWatch watch;
    const ReadingScope scope(readings);
    at::Tensor result = function(inputs.vec());
    parameters = watch.parameters(inputs);
    return result;
  }

  RecomputedFunction function;
  ActivationOffload* offload;  ///< null: nothing to offload, or done
  std::optional<ProcessGroup> group;
  std::string label;
  variable_list parameters;
  variable_list left;  ///< gradients for the second part of a SplitBackward
  Readings readings;
  at::Tensor value;  ///< of the first run, until it is returned

 private:
  at::Tensor part_of(const at::Tensor& input) const {
    require<UsageError>(input.numel() % group->size() == 0,
                        "{}: found {} elements, allowed: a multiple of the {} "
                        "ranks of group {}",
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
  std::vector<std::shared_ptr<ActivationOffload::Kept>> offloaded;
};

struct Recompute : torch::autograd::Function<Recompute> {
  /// The parameters are inputs of the node, so that autograd adds up the gradients of all their
  /// uses, inside and outside, before it accumulates the sum and calls the parameter's hook.
  /// `anchor` requires a gradient, so that backward comes here even if nothing else does.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& anchor,
                            const c10::intrusive_ptr<RecomputedCall>& call, at::TensorList inputs,
                            at::TensorList parameters) {
    (void)anchor, (void)parameters;
    context->save_for_backward(call->keep(inputs));
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    return std::exchange(call->value, at::Tensor());
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require<UsageError>(!at::GradMode::is_enabled(),
                        "recompute: found backward with create_graph, allowed: without; there is "
                        "no second derivative");
    const auto capsule = context->saved_data["call"].toCapsule();
    auto& call = static_cast<RecomputedCall&>(*capsule);
    const bool in_parts = outer_backward().in_parts;
    if (in_parts && !call.left.empty()) return std::exchange(call.left, {});
    variable_list result = gradients(call, call.restore(context->get_saved_variables()), grads[0]);
    if (in_parts) call.left = not_asked_now(*context, result);
    return result;
  }

 private:
  /// Computes the function again, and the gradients of everything that it depends on.
  static variable_list gradients(RecomputedCall& call, const variable_list& inputs,
                                 const at::Tensor& grad) {
    at::Tensor output;
    {
      const at::AutoGradMode enable(true);
      const ReadingScope scope(call.readings);
      output = call.function(inputs);
    }
    variable_list result(2 + inputs.size() + call.parameters.size());
    if (!output.requires_grad()) return result;
    variable_list sources;
    for (const at::Tensor& input : inputs)
      if (input.requires_grad()) sources.push_back(input);
    sources.insert(sources.end(), call.parameters.begin(), call.parameters.end());
    const size_t num_known = sources.size();
    std::optional<CapturesAccumulate> captures;
    if (!is_capturing()) {
      captures.emplace(outer_backward());
      for (const at::Tensor& leaf : leaves_of(output))
        if (!holds(sources, leaf)) sources.push_back(leaf);
    }
    const variable_list found = captured(output, sources, grad, call.parameters);
    for (size_t i = num_known; i < sources.size(); ++i)
      (*torch::autograd::impl::grad_accumulator(sources[i]))({found[i]});
    size_t next = 0, place = 2;
    for (const at::Tensor& input : inputs) {
      if (input.requires_grad()) result[place] = found[next++];
      ++place;
    }
    while (next < num_known) result[place++] = found[next++];
    return result;
  }

  /// The gradients of `sources`. The outer backward calls the hooks of `parameters`.
  static variable_list captured(const at::Tensor& output, const variable_list& sources,
                                const at::Tensor& grad, const variable_list& parameters) {
    const HooksAside aside(parameters);
    return torch::autograd::grad({output}, sources, {grad}, /*retain_graph=*/std::nullopt,
                                 /*create_graph=*/false, /*allow_unused=*/true);
  }

  /// What the running part of a SplitBackward does not ask for, and the other one will; empty if it
  /// asks for everything.
  static variable_list not_asked_now(const AutogradContext& context, variable_list result) {
    const auto node = torch::autograd::get_current_node();
    bool complete = true;
    for (size_t i = 0; i < node->next_edges().size(); ++i) {
      const bool asked = context.needs_input_grad(i);
      complete = complete && (asked || !node->next_edge(i).is_valid());
      if (asked) result[i == 0 ? 0 : i + 1].reset();  // the call is no edge
    }
    return complete ? variable_list() : std::move(result);
  }
};

at::Tensor run_and_keep(const c10::intrusive_ptr<RecomputedCall>& call,
                        const std::vector<at::Tensor>& inputs) {
  call->value = call->run_first(inputs);
  const at::Tensor anchor = at::empty({0}).requires_grad_(true);
  return Recompute::apply(anchor, call, at::TensorList(inputs), at::TensorList(call->parameters));
}

}  // namespace

std::vector<int64_t> read_once(const std::function<std::vector<int64_t>()>& read) {
  return current_scope ? current_scope->next(read) : read();
}

void leave_out_of_recompute(const at::Tensor& parameter) {
  if (current_watch) current_watch->leave_out(parameter);
}

at::Tensor recompute(const RecomputedFunction& function, const std::vector<at::Tensor>& inputs,
                     ActivationOffload* offload) {
  if (!at::GradMode::is_enabled()) return function(inputs);
  return run_and_keep(c10::make_intrusive<RecomputedCall>(function, offload), inputs);
}

at::Tensor recompute_from_parts(const RecomputedFunction& function,
                                const std::vector<at::Tensor>& inputs, const ProcessGroup& group,
                                const std::string& label, ActivationOffload* offload) {
  if (!at::GradMode::is_enabled()) return function(inputs);
  auto call = c10::make_intrusive<RecomputedCall>(function, offload);
  if (group.size() > 1) call->group = group;
  call->label = label;
  return run_and_keep(call, inputs);
}

}  // namespace lockstep
