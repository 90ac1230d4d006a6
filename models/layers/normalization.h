#pragma once

#include "lockstep/core/parameters.h"
#include "lockstep/models/layer_context.h"
#include "lockstep/models/parallel_context.h"

namespace lockstep {

/// RMSNorm or LayerNorm over the last dimension. Parameters: `weight` [width], starts at 1, and
/// with LayerNorm `bias` [width], starts at 0. Neither has
/// weight decay. Both are the same on all ranks of tp; with sequence parallelism each of these sees
/// its part of the tokens, so that their gradients are terms of a sum.
class Norm : public DescribedModule {
 public:
  /// `epsilon` is added to the mean square, or to the variance.
  Norm(const ParallelContext& context, int64_t width, Normalization kind, double epsilon);
  /// By config: hidden_size, normalization, layernorm_epsilon.
  explicit Norm(const LayerContext& context);
  /// `spec` as norm_params() states it.
  Norm(const LayerContext& context, const ModuleSpec& spec);

  /// `input` [..., width] -> the same shape
  at::Tensor forward(const at::Tensor& input) const;

 private:
  Norm(const ParallelContext& context, const ModuleSpec& spec, Normalization kind, double epsilon);

  Normalization kind_;
  double epsilon_;
  at::Tensor weight_;
  at::Tensor bias_;
};

}  // namespace lockstep
