#pragma once

// Internal.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep {

/// A call of an operator of training steps, at a size that occurs there. All in fp32.
struct OperatorTrial {
  using Tensors = std::vector<at::Tensor>;
  std::string name = {};                          ///< as KernelObserver names it
  std::function<Tensors(c10::Device)> make = {};  ///< operands with values
  std::function<void(const Tensors&)> call = {};  ///< may be several calls of operator `name`
  std::function<void(const Tensors&)> plan = {};  ///< on the planned device, where it differs
  double work = 0;        ///< of one call of the operator, as machine.proto counts it
  int64_t num_calls = 0;  ///< of the operator in `call`
};

/// Those that a machine file lists, by name and then by work: products of matrices, attention,
/// norms, activations, rotary embedding, cross entropy, embedding, sums, copies, AdamW and the
/// gradient's norm. Work is what KernelObserver counts of the same calls on a planned device, which
/// must not be registered.
std::vector<OperatorTrial> operator_trials();

}  // namespace lockstep
