#pragma once

#include "lockstep/core/parameters.h"
#include "lockstep/models/layer_context.h"

namespace lockstep {

/// RMSNorm or LayerNorm over the last dimension, by config.normalization. Parameters: `weight`
/// [hidden_size], starts at 1, and with LayerNorm `bias` [hidden_size], starts at 0. Neither has
/// weight decay. Both are the same on all ranks of tp; with sequence parallelism each of these sees
/// its part of the tokens, so that their gradients are terms of a sum.
class Norm : public DescribedModule {
 public:
  explicit Norm(const LayerContext& context);
  /// `spec` as norm_params() states it.
  Norm(const LayerContext& context, const ModuleSpec& spec);

  /// `input` [..., hidden_size] -> the same shape
  at::Tensor forward(const at::Tensor& input) const;

 private:
  Normalization kind_;
  double epsilon_;
  at::Tensor weight_;
  at::Tensor bias_;
};

}  // namespace lockstep
