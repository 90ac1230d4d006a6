#pragma once

#include <cstdint>

#include "lockstep/core/config.h"
#include "lockstep/core/param_spec.h"
#include "lockstep/models/layer_params.h"

namespace lockstep {

/// The part of a model that one chunk of a pipeline stage holds.
struct GPTStage {
  int64_t first_layer = 0;     ///< counted over the whole model
  int64_t num_layers = 0;      ///< may be 0
  bool has_embedding = false;  ///< token ids come in, otherwise activations
  bool has_loss = false;       ///< final norm and output layer; logits or losses come out

  /// All of `config`.
  static GPTStage whole(const TransformerConfig& config) {
    return {0, config.num_layers, true, true};
  }
};

/// How the table of `stage` is used.
TableUse table_use(const TransformerConfig& config, const GPTStage& stage);

/// See TransformerBlock.
ModuleSpec transformer_block_params(const LayerSettings& settings, const GPTStage& stage);

/// All that GPTModel registers for `stage` of a resolved model, in its order, over all ranks of tp,
/// ep and etp: what checkpoints name, the planner counts and each rank has a piece of. With
/// lora.rank the adapters too. Needs no libtorch. UsageError: a size that does not fit into 64
/// bits.
ModuleSpec gpt_params(const LayerSettings& settings, const GPTStage& stage);

/// The part of it that is trained: all, or with lora.rank only the adapters.
ModuleSpec trained_params(const LayerSettings& settings, const GPTStage& stage);

}  // namespace lockstep
