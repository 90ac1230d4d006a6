#include "lockstep/models/layers/transformer_layer.h"

#include <ATen/ATen.h>

namespace lockstep {

TransformerLayer::TransformerLayer(const LayerContext& context)
    : attention_dropout_(context.child("self_attention.dropout"), context.config.hidden_dropout),
      mlp_dropout_(context.child("mlp.dropout"), context.config.hidden_dropout) {
  input_layernorm_ =
      register_module("input_layernorm", std::make_shared<Norm>(context.child("input_layernorm")));
  self_attention_ = register_module(
      "self_attention", std::make_shared<SelfAttention>(context.child("self_attention")));
  pre_mlp_layernorm_ = register_module("pre_mlp_layernorm",
                                       std::make_shared<Norm>(context.child("pre_mlp_layernorm")));
  mlp_ = register_module("mlp", make_feed_forward(context.child("mlp")));
}

at::Tensor TransformerLayer::forward(const at::Tensor& hidden, const TokenPositions& tokens) const {
  const at::Tensor attention = self_attention_->forward(input_layernorm_->forward(hidden), tokens);
  const at::Tensor attended = hidden + attention_dropout_.apply(attention, tokens, is_training());
  const at::Tensor fed = mlp_->forward(pre_mlp_layernorm_->forward(attended));
  return attended + mlp_dropout_.apply(fed, tokens, is_training());
}

}  // namespace lockstep
