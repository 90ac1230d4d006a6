#include "lockstep/models/layers/mlp.h"

#include <ATen/ATen.h>

namespace lockstep {

MLP::MLP(const LayerContext& context) : activation_(context.config.activation) {
  const TransformerConfig& config = context.config;
  const int64_t width = *config.ffn_hidden_size;
  linear_fc1_ = register_module(
      "linear_fc1", std::make_shared<Linear>(context.child("linear_fc1"), config.hidden_size,
                                             activation_ == Activation::swiglu ? 2 * width : width,
                                             config.add_bias_linear, config.init_method_std));
  linear_fc2_ = register_module(
      "linear_fc2",
      std::make_shared<Linear>(context.child("linear_fc2"), width, config.hidden_size,
                               config.add_bias_linear, output_layer_init_std(config)));
}

at::Tensor MLP::forward(const at::Tensor& hidden) const {
  const at::Tensor inner = linear_fc1_->forward(hidden);
  if (activation_ == Activation::gelu) return linear_fc2_->forward(at::gelu(inner));
  const auto halves = inner.chunk(2, -1);
  return linear_fc2_->forward(at::silu(halves[0]) * halves[1]);
}

}  // namespace lockstep
