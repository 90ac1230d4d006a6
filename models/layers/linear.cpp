#include "lockstep/models/layers/linear.h"

#include <cmath>

#include <ATen/ATen.h>

namespace lockstep {

Linear::Linear(const LayerContext& context, int64_t in_features, int64_t out_features, bool bias,
               double init_std) {
  at::Tensor weight = at::empty({out_features, in_features}, context.options);
  fill_normal(weight, init_std, context.seed, context.name + "weight", weight.sizes());
  weight_ = register_described_parameter("weight", weight, {});
  if (!bias) return;
  bias_ = register_described_parameter("bias", at::zeros({out_features}, context.options),
                                       {.apply_weight_decay = false});
}

at::Tensor Linear::forward(const at::Tensor& input) const {
  return at::linear(input, weight_, bias_.defined() ? std::optional(bias_) : std::nullopt);
}

double output_layer_init_std(const TransformerConfig& config) {
  return config.init_method_std / std::sqrt(2.0 * static_cast<double>(config.num_layers));
}

}  // namespace lockstep
