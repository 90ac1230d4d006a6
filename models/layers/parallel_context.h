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

/// What a layer that is cut over ranks needs beside its own sizes. By default one process holds all
/// of it. A model of one's own makes one and passes it to DescribedModule::add_child().
///
/// Modules of torch::nn in the same model have default_description(), gradients that are complete
/// over tp. With sequence_parallel over several ranks that is wrong for one that works between the
/// tensor-parallel regions, and nothing tells where it works: the fronts refuse it by name, until
/// its parent registers it by DescribedModule::register_described_module() with
/// replicated_gradient_state(), or with GradientState::complete inside the regions.
struct ParallelContext {
  ParallelState state = ParallelState::single_process();
  at::TensorOptions options = {};  ///< dtype and device of the parameters
  uint64_t seed = 1234;            ///< of the initial weights
  /// Between the tensor-parallel regions each rank of tp has its part of the sequence.
  bool sequence_parallel = false;
  /// Linear layers of several ranks of tp send beside products in forward, too; see
  /// parallel_linear(). Adapters and linear_cross_entropy.h, whose gathers come first, do not.
  bool tp_comm_overlap = false;
  std::string name = {};  ///< global name of the layer that is being built, ends in "." or empty
  /// Null: weight gradients are never deferred. Otherwise a layer whose gradients a front waits for
  /// may be used once in a forward; a second use is refused in backward, by the layer's name.
  std::shared_ptr<DeferredGradients> deferred = {};
  LoraConfig lora = {};  ///< of adapters that a layer's specification states; see LowRankAdapter
  /// Linear layers multiply in 8-bit floats, with its scales. Null: in the dtype of their weights.
  std::shared_ptr<Fp8Scaling> fp8 = {};

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

  /// State over tp of the gradient of a parameter that all ranks of tp hold and that works between
  /// the tensor-parallel regions: with sequence parallelism each rank sees a part of the tokens.
  GradientState replicated_gradient_state() const {
    return sequence_parallel ? GradientState::partial_sum : GradientState::complete;
  }

  /// `name` without the dot at its end, for messages.
  std::string label() const { return name.empty() ? name : name.substr(0, name.size() - 1); }
};

}  // namespace lockstep
