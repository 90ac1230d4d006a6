#include "lockstep/models/layers/transformer_layer.h"

#include <ATen/ATen.h>

namespace lockstep {

TransformerLayer::TransformerLayer(const LayerContext& context) {
  input_layernorm_ =
      register_module("input_layernorm", std::make_shared<Norm>(context.child("input_layernorm")));
  self_attention_ = register_module(
      "self_attention", std::make_shared<SelfAttention>(context.child("self_attention")));
  pre_mlp_layernorm_ = register_module("pre_mlp_layernorm",
                                       std::make_shared<Norm>(context.child("pre_mlp_layernorm")));
  mlp_ = register_module("mlp", std::make_shared<MLP>(context.child("mlp")));
}

at::Tensor TransformerLayer::forward(const at::Tensor& hidden) const {
  const at::Tensor attended = hidden + self_attention_->forward(input_layernorm_->forward(hidden));
  return attended + mlp_->forward(pre_mlp_layernorm_->forward(attended));
}

}  // namespace lockstep
