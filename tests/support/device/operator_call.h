#pragma once

// Internal: an operator with its arguments, as the fallback uses it.

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
  c10::DeviceIndex device = 0;  ///< of the tensors; without tensors, of a Device argument

  const c10::FunctionSchema& schema() const { return op.schema(); }
  const std::string& name() const { return op.schema().name(); }  ///< "aten::add"
  /// The operator with its operands' shapes and dtypes, for messages.
  std::string text() const;
};

using TensorFunction = std::function<at::Tensor(const at::Tensor&)>;

bool is_lagging(const at::Tensor& tensor);

/// `value` with each defined tensor in it replaced.
c10::IValue map_tensors(const c10::IValue& value, const TensorFunction& function);
/// Calls `visit` for each tensor in the value, including undefined ones.
void visit_tensors(const c10::IValue& value, const std::function<void(const at::Tensor&)>& visit);

/// Takes the call's arguments off the stack. Throws c10::Error for tensors on several devices, or
/// CPU operands that CUDA would not take. Reads CPU operands: a CPU tensor of one element is
/// copied; so is a CPU index tensor, for which the host waits.
OperatorCall take_call(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// The call's arguments, with tensors on the device and Device arguments replaced.
std::vector<c10::IValue> arguments_on(const OperatorCall& call, c10::Device device,
                                      const TensorFunction& twin);

}  // namespace lockstep::testing
