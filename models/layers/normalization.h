#pragma once

#include <optional>
#include <string>

#include "lockstep/core/parameters.h"
#include "lockstep/models/layer_context.h"
#include "lockstep/models/parallel_context.h"

namespace lockstep {

/// RMSNorm or LayerNorm over the last dimension. Parameters: `weight` [width], which starts at 1,
/// and with LayerNorm `bias` [width], which starts at 0. Neither has weight decay. Both are
/// replicated over tp; with sequence parallelism each tp rank sees its part of the tokens, so the
/// gradients are terms of a sum.
class Norm : public DescribedModule {
 public:
  /// `epsilon` is added to the mean square, or to the variance. UsageError if it is not a finite
  /// number >= 0.
  Norm(const ParallelContext& context, int64_t width, Normalization kind, double epsilon);
  /// By config: hidden_size, normalization, layernorm_epsilon.
  explicit Norm(const LayerContext& context);
  /// `spec` as norm_params() returns it.
  Norm(const LayerContext& context, const ModuleSpec& spec);

  /// `input` [..., width] in the dtype of the weights, or in bf16 or fp16 if the weights are fp32
  /// -> the same shape. UsageError, naming the layer, for another shape or dtype. Backward with
  /// create_graph is a UsageError.
  at::Tensor forward(const at::Tensor& input) const;

  /// The residual, which bypasses a network, and the normalized input of the network.
  struct Branches {
    at::Tensor residual;
    at::Tensor normalized;
  };

  /// `input` itself and forward(input). In backward the gradients of both are added in one pass.
  Branches beside(const at::Tensor& input) const;

  /// input + residual, of the same shape and dtype (UsageError), and forward() of this sum, with
  /// one pass in forward and one in backward.
  Branches of_sum(const at::Tensor& input, const at::Tensor& residual) const;

 private:
  Branches run(const at::Tensor& input, const std::optional<at::Tensor>& residual) const;

  Norm(const ParallelContext& context, const ModuleSpec& spec, double epsilon);

  double epsilon_;
  std::string label_;
  at::Tensor weight_;
  at::Tensor bias_;
};

}  // namespace lockstep
