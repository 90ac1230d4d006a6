#include "lockstep/models/layers/mlp.h"

#include <ATen/ATen.h>

#include "lockstep/core/expert_rules.h"
#include "lockstep/models/layers/activation.h"
#include "lockstep/models/layers/moe/moe_layer.h"

namespace lockstep {

std::shared_ptr<FeedForward> make_feed_forward(const LayerContext& context) {
  if (has_experts(context.config, context.layer)) return std::make_shared<MoELayer>(context);
  return std::make_shared<MLP>(context, *context.config.ffn_hidden_size);
}

MLP::MLP(const LayerContext& context, int64_t width) : activation_(context.config.activation) {
  const TransformerConfig& config = context.config;
  const bool gated = activation_ == Activation::swiglu;
  linear_fc1_ = register_module(
      "linear_fc1", std::make_shared<ColumnParallelLinear>(
                        context.child("linear_fc1"), config.hidden_size,
                        gated ? std::vector<int64_t>{2, width} : std::vector<int64_t>{width},
                        config.add_bias_linear, config.init_method_std));
  linear_fc2_ = register_module(
      "linear_fc2",
      std::make_shared<RowParallelLinear>(context.child("linear_fc2"), width, config.hidden_size,
                                          config.add_bias_linear, output_layer_init_std(config)));
}

at::Tensor MLP::forward(const at::Tensor& hidden) const {
  return linear_fc2_->forward(activate(activation_, linear_fc1_->forward(hidden)));
}

}  // namespace lockstep
