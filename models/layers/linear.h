#pragma once

#include <memory>

#include "lockstep/core/parameters.h"
#include "lockstep/models/layers/layer_context.h"

namespace lockstep {

/// y = x W^T (+ b). Parameters: `weight` [out_features, in_features], `bias` [out_features].
class Linear : public DescribedModule {
 public:
  /// The weight starts as normal values of standard deviation `init_std`, the bias as zero.
  Linear(const LayerContext& context, int64_t in_features, int64_t out_features, bool bias,
         double init_std);

  /// `input` [..., in_features] -> [..., out_features]
  at::Tensor forward(const at::Tensor& input) const;

  const at::Tensor& weight() const { return weight_; }

 private:
  at::Tensor weight_;
  at::Tensor bias_;
};

/// Standard deviation of the layers that write into the residual stream: init_method_std /
/// sqrt(2 num_layers), as in Megatron Core's scaled_init_method_normal.
double output_layer_init_std(const TransformerConfig& config);

}  // namespace lockstep
