#pragma once

// Internal.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep {

/// A call of an operator that training steps use, at a size that occurs there. All in fp32.
struct OperatorTrial {
  using Tensors = std::vector<at::Tensor>;
  std::string name = {};                          ///< as KernelObserver names it
  std::function<Tensors(c10::Device)> make = {};  ///< operands with values
  std::function<void(const Tensors&)> call = {};  ///< may be several calls of operator `name`
  std::function<void(const Tensors&)> plan = {};  ///< the call on the planned device, if it differs
  double work = 0;        ///< of one call of the operator, as machine.proto counts it
  int64_t num_calls = 0;  ///< of the operator in `call`
};

/// The trials that a machine file lists, by name and then by work: matrix products, attention,
/// norms, activations, rotary embedding, cross entropy, embedding, sums, copies, AdamW and the
/// gradient's norm. Work is what KernelObserver counts for the same calls on a planned device; none
/// may be registered when this is called.
std::vector<OperatorTrial> operator_trials();

}  // namespace lockstep
