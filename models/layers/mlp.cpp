#include "lockstep/models/mlp.h"

#include <ATen/ATen.h>

#include "lockstep/models/activation.h"

namespace lockstep {

MLP::MLP(const LayerContext& context, const ModuleSpec& spec)
    : activation_(context.config.activation) {
  linear_fc1_ = add_child<ColumnParallelLinear>(context, spec, "linear_fc1");
  linear_fc2_ = add_child<RowParallelLinear>(context, spec, "linear_fc2");
}

MLP::MLP(const LayerContext& context, int64_t width)
    : MLP(context, mlp_params(context.settings(), width)) {}

at::Tensor MLP::forward(const at::Tensor& hidden, const TokenPositions& tokens) const {
  return linear_fc2_->forward(activate(activation_, linear_fc1_->forward(hidden, tokens)), tokens);
}

}  // namespace lockstep
