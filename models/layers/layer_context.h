#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

#include "lockstep/core/config.h"
#include "lockstep/models/layer_params.h"
#include "lockstep/models/parallel_context.h"
#include "lockstep/models/token_loss_scale.h"

namespace lockstep {

class RotaryEmbedding;

/// What the layers of the reference GPT need. They take their sizes from its configuration. By
/// default one process holds all of a layer.
struct LayerContext {
  TransformerConfig config;   ///< resolved
  at::TensorOptions options;  ///< dtype and device of the parameters
  uint64_t seed = 1234;       ///< of the initial weights and of dropout
  std::string name = {};  ///< global name of the layer that is being built, ends in "." or empty
  ParallelConfig parallel = {};  ///< checked together with `config`, with the sizes of `state`
  ParallelState state = ParallelState::single_process();
  int64_t layer = 0;  ///< of the transformer layer that is built, from 0 over the whole model
  std::shared_ptr<DeferredGradients> deferred = {};  ///< null: weight gradients are never deferred
  std::shared_ptr<const TokenLossScale> loss_scale = {};  ///< of the routers' losses; null: 1
  LoraConfig lora = {};                  ///< resolved; without a rank there are no adapters
  std::shared_ptr<Fp8Scaling> fp8 = {};  ///< see ParallelContext
  bool perform_initialization = true;    ///< of the weights; see ParamOrigin
  std::shared_ptr<const RotaryEmbedding> rotary = {};  ///< of all layers; null: each makes its own

  /// The context of a child that is registered under `child_name`.
  LayerContext child(const std::string& child_name) const {
    LayerContext context = *this;
    context.name += child_name + ".";
    return context;
  }

  /// The ranks that split each layer's matrices; connected at the first call.
  ProcessGroup tensor_parallel() const { return state.group(GroupKind::tp); }

  /// For the functions of layer_params.h. Refers to `config`.
  LayerSettings settings() const {
    return {config, state.grids().sizes().tensor, parallel.sequence_parallel, layer, lora};
  }

  /// For the layers that take their sizes alone.
  operator ParallelContext() const {
    return {.state = state,
            .options = options,
            .seed = seed,
            .sequence_parallel = parallel.sequence_parallel,
            .tp_comm_overlap = parallel.tp_comm_overlap,
            .name = name,
            .deferred = deferred,
            .lora = lora,
            .fp8 = fp8,
            .perform_initialization = perform_initialization};
  }

  /// See ParallelContext.
  ParamOrigin origin() const { return ParallelContext(*this).origin(); }

  /// See LayerSettings.
  GradientState replicated_gradient_state() const { return settings().replicated_gradient_state(); }
};

}  // namespace lockstep
