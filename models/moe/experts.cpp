#include "lockstep/models/experts.h"

#include <utility>

#include <ATen/ATen.h>

#include "lockstep/models/activation.h"

namespace lockstep {

ExpertLinear::ExpertLinear(const LayerContext& context, const ModuleSpec& spec) {
  weight_ = add(spec.at("weight"), context.origin());
  if (context.fp8) fp8_ = context.fp8->add_experts(context.name + "weight", weight_);
  const ParamSpec* const bias = spec.find("bias");
  if (bias == nullptr) return;
  bias_ = add(*bias, context.origin());
  const bool cut = bias->description.placement(MeshAxis::etp) != Placement(Replicate{});
  adds_bias_ = cut || context.state.group(GroupKind::expert_tp).rank() == 0;
}

ExpertLinear::ExpertLinear(const LayerContext& context, std::vector<int64_t> out, int64_t in,
                           Cut cut, double init_std)
    : ExpertLinear(context,
                   expert_linear_params(context.settings(), std::move(out), in, cut, init_std)) {}

at::Tensor ExpertLinear::forward(const at::Tensor& x, const RowGroupsPtr& groups) const {
  const at::Tensor y = grouped_linear(x, weight_.flatten(1, -2), groups, fp8_);
  if (!bias_.defined()) return y;
  const at::Tensor own = adds_bias_ ? bias_ : bias_ * 0;
  return add_expert_bias(y, own.flatten(1), groups);
}

GroupedMLP::GroupedMLP(const LayerContext& context, const ModuleSpec& spec)
    : activation_(context.config.activation) {
  linear_fc1_ = add_child<ExpertLinear>(context, spec, "linear_fc1");
  linear_fc2_ = add_child<ExpertLinear>(context, spec, "linear_fc2");
}

GroupedMLP::GroupedMLP(const LayerContext& context)
    : GroupedMLP(context, grouped_mlp_params(context.settings())) {}

at::Tensor GroupedMLP::forward(const at::Tensor& tokens, const RowGroupsPtr& groups) const {
  return linear_fc2_->forward(activate(activation_, linear_fc1_->forward(tokens, groups)), groups);
}

}  // namespace lockstep
