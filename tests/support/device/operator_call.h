#pragma once

// Internal: an operator with its arguments, and what the fallback makes of them.

#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

namespace lockstep::testing {

struct OperatorCall {
  c10::OperatorHandle op;
  std::vector<c10::IValue> arguments;
  c10::DeviceIndex device = 0;  ///< of the tensors; without tensors that of a Device argument

  const c10::FunctionSchema& schema() const { return op.schema(); }
  const std::string& name() const { return op.schema().name(); }  ///< "aten::add"
  /// The operator with its operands' shapes and dtypes, for messages.
  std::string text() const;
};

using TensorFunction = std::function<at::Tensor(const at::Tensor&)>;

bool is_lagging(const at::Tensor& tensor);

/// `value` with each defined tensor in it replaced.
c10::IValue map_tensors(const c10::IValue& value, const TensorFunction& function);
/// Calls `visit` with each tensor in the value, undefined ones too.
void visit_tensors(const c10::IValue& value, const std::function<void(const at::Tensor&)>& visit);

/// Takes the call's arguments off the stack. c10::Error: tensors on several devices, or CPU
/// operands that CUDA would not take. Reads what it takes: a CPU tensor of one element is copied, a
/// CPU index tensor too, for which the host waits.
OperatorCall take_call(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// The call's arguments with the tensors on the device, and Device arguments, replaced.
std::vector<c10::IValue> arguments_on(const OperatorCall& call, c10::Device device,
                                      const TensorFunction& twin);

}  // namespace lockstep::testing
