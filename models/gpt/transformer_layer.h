#pragma once

#include <memory>

#include "lockstep/core/parameters.h"
#include "lockstep/models/attention.h"
#include "lockstep/models/dropout.h"
#include "lockstep/models/hidden_check.h"
#include "lockstep/models/layer_context.h"
#include "lockstep/models/mlp.h"
#include "lockstep/models/normalization.h"

namespace lockstep {

/// One pre-norm transformer layer: x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x))).
/// Children: `input_layernorm`, `self_attention`, `pre_mlp_layernorm`, `mlp`.
class TransformerLayer : public DescribedModule {
 public:
  /// `context.layer` is the number of the layer.
  explicit TransformerLayer(const LayerContext& context);
  /// `spec` as transformer_layer_params() returns it.
  TransformerLayer(const LayerContext& context, const ModuleSpec& spec);

  /// `hidden` [sequence, batch, hidden_size], with sequence parallelism this rank's [sequence /
  /// ranks, ...] -> the same shape. UsageError, naming the layer: another shape or dtype.
  at::Tensor forward(const at::Tensor& hidden, const TokenPositions& tokens) const;

 private:
  HiddenCheck check_;
  std::shared_ptr<Norm> input_layernorm_;
  std::shared_ptr<Attention> self_attention_;
  std::shared_ptr<Norm> pre_mlp_layernorm_;
  std::shared_ptr<FeedForward> mlp_;
  Dropout attention_dropout_;
  Dropout mlp_dropout_;
};

}  // namespace lockstep
