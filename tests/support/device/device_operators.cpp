#include <cstring>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include "lockstep/tests/support/device/device_generators.h"
#include "lockstep/tests/support/device/device_memory.h"
#include "lockstep/tests/support/device/device_registration.h"
#include "lockstep/tests/support/device/device_state.h"
#include "lockstep/tests/support/device/device_storage.h"
#include "lockstep/tests/support/device/device_streams.h"
#include "lockstep/tests/support/device/graph_capture.h"
#include "lockstep/tests/support/device/operator_kernels.h"
#include "lockstep/tests/support/device/operator_rules.h"

namespace lockstep::testing {
namespace {

using Values = std::vector<c10::IValue>;

Values call_now(const c10::OperatorHandle& op, const Values& arguments) {
  torch::jit::Stack stack(arguments.begin(), arguments.end());
  op.callBoxed(&stack);
  return stack;
}

at::Tensor with_number_flag(at::Tensor twin, const at::Tensor& tensor) {
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    twin.unsafeGetTensorImpl()->set_wrapped_number(true);
  return twin;
}

at::Tensor meta_twin(const at::Tensor& tensor) {
  return with_number_flag(
      at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta)),
      tensor);
}

at::Tensor zero_twin(const at::Tensor& tensor) {
  at::Tensor twin =
      at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  if (twin.numel() > 0) std::memset(twin.storage().mutable_data(), 0, twin.storage().nbytes());
  return with_number_flag(std::move(twin), tensor);
}

/// The call's arguments for the CPU's kernel; a tensor that occurs twice maps to one tensor.
Values host_arguments(const OperatorCall& call) {
  std::vector<std::pair<c10::TensorImpl*, at::Tensor>> views;
  return arguments_on(call, at::kCPU, [&](const at::Tensor& tensor) {
    for (const auto& [seen, view] : views)
      if (seen == tensor.unsafeGetTensorImpl()) return view;
    views.emplace_back(tensor.unsafeGetTensorImpl(), host_view(tensor));
    return views.back().second;
  });
}

/// Results that give only the shapes: from the meta kernel, or else from the CPU's kernel on zeros.
Values shapes_of(const OperatorCall& call) {
  const bool has_meta =
      call.op.hasKernelForDispatchKey(c10::DispatchKey::Meta) ||
      call.op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
  if (has_meta && !meta_kernel_is_stricter(call)) {
    try {
      return call_now(call.op, arguments_on(call, at::kMeta, &meta_twin));
    } catch (const c10::NotImplementedError&) {
    }
  }
  return call_now(call.op, arguments_on(call, at::kCPU, &zero_twin));
}

at::Tensor new_result(const OperatorCall& call, const at::Tensor& shape) {
  return empty_on_device(shape.sizes(), shape.strides(), shape.scalar_type(),
                         device_at(call.device));
}

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  for (int64_t dim = 0; dim < a.dim() && a.numel() > 0; ++dim)
    if (a.size(dim) > 1 && a.stride(dim) != b.stride(dim)) return false;
  return true;
}

/// Copies what the CPU's kernel returned into the results' memory.
void store(const at::Tensor& computed, const at::Tensor& result) {
  TORCH_CHECK(same_layout(computed, result), "computed ", computed.sizes(), " with strides ",
              computed.strides(), " of ", computed.scalar_type(), ", but its shape was given as ",
              result.sizes(), " with strides ", result.strides(), " of ", result.scalar_type());
  result.copy_(computed);
}

/// Resizes an `out` argument to the result's shape.
void fit_written(const at::Tensor& argument, const c10::IValue& shape) {
  if (!shape.isTensor() || argument.sizes() == shape.toTensor().sizes()) return;
  resize_tensor(argument, shape.toTensor().sizes(), shape.toTensor().strides());
}

/// The return values of the call; tensors do not hold their values yet. `made`: host views of the
/// new tensors, in order.
Values make_results(const OperatorCall& call, std::vector<at::Tensor>& made) {
  const size_t count = call.schema().returns().size();
  const bool in_place = works_in_place(call);
  const Values shapes = in_place ? Values(count) : shapes_of(call);
  Values results;
  for (size_t i = 0; i < count; ++i) {
    if (const auto written = written_argument(call, i)) {
      if (!in_place) fit_written(call.arguments[*written].toTensor(), shapes[i]);
      results.push_back(call.arguments[*written]);
      continue;
    }
    TORCH_CHECK(!call.schema().returns()[i].alias_info(), "lagging device: ", call.name(),
                " returns a view and has no kernel of its own");
    results.push_back(map_tensors(shapes[i], [&](const at::Tensor& shape) {
      const at::Tensor result = new_result(call, shape);
      made.push_back(host_view(result));
      return result;
    }));
  }
  return results;
}

void compute(const c10::OperatorHandle& op, const Values& arguments,
             const std::vector<at::Tensor>& made) {
  const auto as_by_cuda = computed_as_by_cuda(op, arguments);
  const Values computed = as_by_cuda ? Values{*as_by_cuda} : call_now(op, arguments);
  auto next = made.begin();
  for (size_t i = 0; i < computed.size() && next != made.end(); ++i) {
    if (op.schema().returns()[i].alias_info()) continue;
    visit_tensors(computed[i], [&](const at::Tensor& tensor) {
      if (tensor.defined()) store(tensor, *next++);
    });
  }
}

void launch_later(const OperatorCall& call, torch::jit::Stack* stack) {
  std::vector<at::Tensor> made;
  for (c10::IValue& result : make_results(call, made)) stack->push_back(std::move(result));
  enqueue(current_stream(call.device), call.text(),
          [op = call.op, arguments = host_arguments(call), made] { compute(op, arguments, made); });
}

/// The host waits for the stream and then returns the result.
void compute_and_wait(const OperatorCall& call, torch::jit::Stack* stack) {
  struct Outcome {
    Values values;
    std::exception_ptr error;
  };
  const auto outcome = std::make_shared<Outcome>();
  const c10::Stream stream = current_stream(call.device);
  enqueue(stream, call.text(), [outcome, op = call.op, arguments = host_arguments(call)] {
    try {
      outcome->values = call_now(op, arguments);
    } catch (...) {
      outcome->error = std::current_exception();
    }
  });
  wait_for_stream(stream, call.name());
  if (outcome->error) std::rethrow_exception(outcome->error);
  for (size_t i = 0; i < outcome->values.size(); ++i) {
    if (const auto written = written_argument(call, i)) {
      stack->push_back(call.arguments[*written]);
      continue;
    }
    stack->push_back(map_tensors(outcome->values[i], [&](const at::Tensor& computed) {
      const at::Tensor result = new_result(call, computed);
      enqueue(stream, call.text(), [computed, view = host_view(result)] { store(computed, view); });
      return result;
    }));
  }
}

// Draws in the order of the launches, whatever the streams do.
void draw_now(const OperatorCall& call, torch::jit::Stack* stack) {
  std::vector<std::pair<at::Tensor, at::Tensor>> drawn;
  const Values arguments = arguments_on(call, at::kCPU, [&](const at::Tensor& tensor) {
    drawn.emplace_back(zero_twin(tensor), host_view(tensor));
    return drawn.back().first;
  });
  call_now(call.op, arguments);
  for (const auto& [from, to] : drawn)
    enqueue(current_stream(call.device), call.text(), [from = from, to = to] { store(from, to); });
  for (size_t i = 0; i < call.schema().returns().size(); ++i)
    stack->push_back(call.arguments[written_argument(call, i).value()]);
}

// The fused attention that the CPU would choose, so that the bits match.
int64_t choose_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const std::optional<at::Tensor>& mask, double dropout, bool causal,
                         std::optional<double> scale, bool enable_gqa) {
  const auto twin = [](const at::Tensor& tensor) {
    return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU))
        .requires_grad_(tensor.requires_grad());
  };
  const auto cpu_mask = mask && mask->defined() ? std::optional<at::Tensor>(twin(*mask)) : mask;
  return at::_fused_sdp_choice(twin(query), twin(key), twin(value), cpu_mask, dropout, causal,
                               scale, enable_gqa);
}

bool has_cpu_and_composite_kernel(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
         !op.hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1) &&
         (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
          op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd));
}

// Without these kernels, the device would use the composite ones, whose bits differ from the CPU's.
void prefer_cpu_kernels(torch::Library& library) {
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || name.getNamespace() != "aten" || !has_cpu_and_composite_kernel(*op)) continue;
    const std::string plain = name.name.substr(std::string("aten::").size());
    const std::string full = name.overload_name.empty() ? plain : plain + "." + name.overload_name;
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&launch_operator>());
  }
  // Its composite kernel would wait twice for a mask: once for the shape and once for the values.
  library.impl("index.Tensor", torch::CppFunction::makeFromBoxedFunction<&launch_operator>());
}

/// Sets the device's generator unless the call has one. The numbers are drawn at launch, so a graph
/// cannot replay them.
void set_generator(OperatorCall& call, size_t argument) {
  refuse_in_capture(current_stream(call.device), "the random numbers of " + call.text());
  if (call.arguments[argument].isNone()) call.arguments[argument] = device_generator(call.device);
}

}  // namespace

void launch_operator(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView below;
  OperatorCall call = take_call(op, stack);
  refuse_what_cuda_lacks(call);
  if (const auto generator = generator_argument(call.schema())) set_generator(call, *generator);
  if (only_draws(call)) return draw_now(call, stack);
  if (needs_values(call)) return compute_and_wait(call, stack);
  launch_later(call, stack);
}

void register_device_operators() {
  static auto* const kernels = new torch::Library(
      torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  static auto* const fallback = new torch::Library(
      torch::Library::IMPL, "_", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  add_view_kernels(*kernels);
  add_copy_kernels(*kernels);
  prefer_cpu_kernels(*kernels);
  fallback->fallback(torch::CppFunction::makeFromBoxedFunction<&launch_operator>());
  at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(&choose_attention);
}

}  // namespace lockstep::testing
