#include "lockstep/models/transformer_layer.h"

#include <ATen/ATen.h>

#include "lockstep/models/feed_forward.h"

namespace lockstep {

TransformerLayer::TransformerLayer(const LayerContext& context, const ModuleSpec& spec)
    : check_(context, "TransformerLayer"),
      attention_dropout_(context.child("self_attention.dropout"), context.config.hidden_dropout),
      mlp_dropout_(context.child("mlp.dropout"), context.config.hidden_dropout) {
  input_layernorm_ = add_child<Norm>(context, spec, "input_layernorm");
  self_attention_ = add_child_by(attention_from, context, spec, "self_attention");
  pre_mlp_layernorm_ = add_child<Norm>(context, spec, "pre_mlp_layernorm");
  mlp_ = add_child_by(feed_forward_from, context, spec, "mlp");
}

TransformerLayer::TransformerLayer(const LayerContext& context)
    : TransformerLayer(context, transformer_layer_params(context.settings())) {}

at::Tensor TransformerLayer::forward(const at::Tensor& hidden, const TokenPositions& tokens) const {
  check_(hidden);
  const auto [residual, normalized] = input_layernorm_->beside(hidden);
  const at::Tensor attention = self_attention_->forward(normalized, tokens);
  const auto [attended, input] = pre_mlp_layernorm_->of_sum(
      attention_dropout_.apply(attention, tokens, is_training()), residual);
  return mlp_dropout_.add(mlp_->forward(input, tokens), attended, tokens, is_training());
}

}  // namespace lockstep
