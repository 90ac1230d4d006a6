#include "lockstep/models/layers/normalization.h"

#include <ATen/ATen.h>

namespace lockstep {

Norm::Norm(const LayerContext& context)
    : kind_(context.config.normalization), epsilon_(context.config.layernorm_epsilon) {
  const int64_t width = context.config.hidden_size;
  const ParamDescription description{
      .gradient_states = {{MeshAxis::tp, context.replicated_gradient_state()}},
      .apply_weight_decay = false};
  weight_ = register_described_parameter("weight", at::ones({width}, context.options), description);
  if (kind_ == Normalization::LayerNorm)
    bias_ = register_described_parameter("bias", at::zeros({width}, context.options), description);
}

at::Tensor Norm::forward(const at::Tensor& input) const {
  if (kind_ == Normalization::RMSNorm)
    return at::rms_norm(input, weight_.sizes(), weight_, epsilon_);
  return at::layer_norm(input, weight_.sizes(), weight_, bias_, epsilon_);
}

}  // namespace lockstep
