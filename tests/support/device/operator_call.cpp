#include "lockstep/tests/support/device/operator_call.h"

#include <optional>
#include <sstream>

#include "lockstep/tests/support/device/device_state.h"
#include "lockstep/tests/support/device/device_streams.h"

namespace lockstep::testing {
namespace {

std::string shape_of(const at::Tensor& tensor) {
  std::ostringstream text;
  if (!tensor.defined()) return "none";
  text << tensor.sizes() << " " << at::toString(tensor.scalar_type());
  return text.str();
}

void check_same_device(const OperatorCall& call, std::optional<c10::Device>& found,
                       const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  if (!found && is_lagging(tensor)) found = tensor.device();
  if (!is_lagging(tensor)) return;
  TORCH_CHECK(tensor.device() == *found,
              "Expected all tensors to be on the same device, but found at least two devices, ",
              *found, " and ", tensor.device(), "! (in ", call.name(), ")");
}

c10::DeviceIndex device_of(const OperatorCall& call) {
  std::optional<c10::Device> found;
  for (const c10::IValue& argument : call.arguments)
    visit_tensors(argument,
                  [&](const at::Tensor& tensor) { check_same_device(call, found, tensor); });
  for (const c10::IValue& argument : call.arguments)
    if (!found && argument.isDevice() && argument.toDevice().has_index())
      found = argument.toDevice();
  return found ? found->index() : current_device();
}

at::Tensor copied(const at::Tensor& on_host) {
  at::Tensor copy = on_host.clone();
  if (on_host.unsafeGetTensorImpl()->is_wrapped_number())
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

at::Tensor read_number(const OperatorCall& call, const at::Tensor& tensor) {
  if (is_lagging(tensor)) return tensor;
  TORCH_CHECK(tensor.device().is_cpu() && tensor.dim() == 0,
              "Expected all tensors to be on the same device, but found at least two devices, ",
              device_at(call.device), " and ", tensor.device(), "! (in ", call.name(), ")");
  return copied(tensor);
}

at::Tensor read_indices(const OperatorCall& call, const at::Tensor& tensor) {
  if (is_lagging(tensor) || tensor.dim() == 0) return read_number(call, tensor);
  wait_for_stream(current_stream(call.device), "copy from pageable memory");
  return copied(tensor);
}

}  // namespace

bool is_lagging(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kLagging;
}

std::string OperatorCall::text() const {
  std::string shapes;
  for (const c10::IValue& argument : arguments)
    visit_tensors(argument, [&](const at::Tensor& tensor) {
      shapes += (shapes.empty() ? "" : ", ") + shape_of(tensor);
    });
  return name() + "(" + shapes + ") on " + device_at(device).str();
}

c10::IValue map_tensors(const c10::IValue& value, const TensorFunction& function) {
  const auto mapped = [&](const at::Tensor& tensor) {
    return tensor.defined() ? function(tensor) : tensor;
  };
  if (value.isTensor()) return mapped(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(mapped(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::optional<at::Tensor>(mapped(*tensor)) : std::nullopt);
    return list;
  }
  return value;
}

void visit_tensors(const c10::IValue& value, const std::function<void(const at::Tensor&)>& visit) {
  if (value.isTensor()) visit(value.toTensor());
  if (value.isTensorList())
    for (const at::Tensor& tensor : value.toTensorVector()) visit(tensor);
  if (value.isOptionalTensorList())
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      if (tensor) visit(*tensor);
}

OperatorCall take_call(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  OperatorCall call{op, torch::jit::pop(*stack, count)};
  call.device = device_of(call);
  for (c10::IValue& argument : call.arguments)
    argument = map_tensors(argument, [&](const at::Tensor& tensor) {
      return argument.isOptionalTensorList() ? read_indices(call, tensor)
                                             : read_number(call, tensor);
    });
  return call;
}

std::vector<c10::IValue> arguments_on(const OperatorCall& call, c10::Device device,
                                      const TensorFunction& twin) {
  std::vector<c10::IValue> arguments;
  for (const c10::IValue& argument : call.arguments) {
    if (argument.isDevice() && argument.toDevice().type() == kLagging)
      arguments.emplace_back(device);
    else
      arguments.push_back(map_tensors(argument, [&](const at::Tensor& tensor) {
        return is_lagging(tensor) ? twin(tensor) : tensor;
      }));
  }
  return arguments;
}

}  // namespace lockstep::testing
