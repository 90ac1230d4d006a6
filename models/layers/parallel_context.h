#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <c10/core/TensorOptions.h>

#include "lockstep/core/config.h"
#include "lockstep/core/deferred_gradients.h"
#include "lockstep/core/parameters.h"
#include "lockstep/parallel_state/parallel_state.h"

namespace lockstep {

class Fp8Scaling;

/// What a layer that is cut over ranks needs besides its own sizes. The default is one process that
/// holds the whole layer. Your own model creates a context and passes it to
/// DescribedModule::add_child(). Set `state` to the one that you give the front: it refuses a
/// parameter that was cut for other numbers of ranks.
///
/// torch::nn modules in the same model have default_description(), with gradients that are complete
/// over tp. With sequence_parallel over several ranks this is wrong for a module between the
/// tensor-parallel regions, and its place cannot be detected. The fronts therefore refuse such a
/// module, naming it, unless its parent registers it with
/// DescribedModule::register_described_module() and replicated_gradient_state(), or
/// GradientState::complete inside the regions.
struct ParallelContext {
  ParallelState state = ParallelState::single_process();
  at::TensorOptions options = {};  ///< dtype and device of the parameters
  uint64_t seed = 1234;            ///< of the initial weights
  /// Between the tensor-parallel regions each rank of tp has its part of the sequence.
  bool sequence_parallel = false;
  /// Linear layers over several tp ranks overlap communication with matrix products in forward,
  /// too; see parallel_linear(). Adapters and linear_cross_entropy.h gather first and do not
  /// overlap.
  bool tp_comm_overlap = false;
  std::string name = {};  ///< global name of the layer that is being built, ends in "." or empty
  /// Null: weight gradients are never deferred. Otherwise a layer whose gradients a front waits for
  /// may be used only once in a forward; backward refuses a second use and names the layer. A
  /// PipelineExecutor that splits backward must get the same: without it, backward refuses too.
  std::shared_ptr<DeferredGradients> deferred = {};
  LoraConfig lora = {};  ///< of adapters that a layer's specification states; see LowRankAdapter
  /// Linear layers multiply in 8-bit floats with these scales. Null: in the dtype of their weights.
  std::shared_ptr<Fp8Scaling> fp8 = {};
  bool perform_initialization = true;  ///< of the weights; see ParamOrigin

  /// The context of a child that is registered under `child_name`.
  ParallelContext child(const std::string& child_name) const {
    ParallelContext context = *this;
    context.name += child_name + ".";
    return context;
  }

  /// The ranks that split each layer's matrices; connected at the first call.
  ProcessGroup tensor_parallel() const { return state.group(GroupKind::tp); }

  /// For DescribedModule::add(). Connects the groups of the axes over which a parameter is cut: tp,
  /// etp, ep.
  ParamOrigin origin() const;

  /// The state over tp of the gradient of a parameter that is replicated over tp and used between
  /// the tensor-parallel regions: with sequence parallelism each rank sees a part of the tokens.
  GradientState replicated_gradient_state() const {
    return sequence_parallel ? GradientState::partial_sum : GradientState::complete;
  }

  /// `name` without the dot at its end, for messages.
  std::string label() const { return name.empty() ? name : name.substr(0, name.size() - 1); }
};

}  // namespace lockstep
