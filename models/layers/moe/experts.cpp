#include "lockstep/models/layers/moe/experts.h"

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/models/layers/activation.h"
#include "lockstep/models/layers/linear.h"
#include "lockstep/models/layers/moe/grouped_linear.h"

namespace lockstep {

ExpertLinear::ExpertLinear(const LayerContext& context, std::vector<int64_t> out, int64_t in,
                           Cut cut, double init_std) {
  const ProcessGroup ep = context.state.group(GroupKind::ep);
  const ProcessGroup etp = context.state.group(GroupKind::expert_tp);
  std::vector<int64_t> shape = {*context.config.num_experts};
  shape.insert(shape.end(), out.begin(), out.end());
  shape.push_back(in);
  const size_t dim = cut == Cut::in ? shape.size() - 1 : shape.size() - 2;
  std::vector<int64_t> part = shape, offset(shape.size(), 0);
  const auto divide = [&](size_t which, const ProcessGroup& group) {
    require<UsageError>(shape[which] % group.size() == 0,
                        "{}weight: dimension {} has size {}, allowed: a multiple of the {} ranks "
                        "of {}",
                        context.name, which, shape[which], group.size(), group.name());
    part[which] /= group.size();
    offset[which] = part[which] * group.rank();
  };
  divide(0, ep);
  divide(dim, etp);
  at::Tensor weight = at::empty(part, context.options);
  fill_normal(weight, init_std, context.seed, context.name + "weight", shape, offset);
  weight_ = register_described_parameter(
      "weight", weight,
      {.placements = {{MeshAxis::ep, Shard{0}}, {MeshAxis::etp, Shard{static_cast<int64_t>(dim)}}},
       .is_expert = true});
  if (!context.config.add_bias_linear) return;
  part.pop_back();
  ParamDescription description{
      .placements = {{MeshAxis::ep, Shard{0}}}, .is_expert = true, .apply_weight_decay = false};
  if (cut == Cut::out)
    description.placements[MeshAxis::etp] = Shard{static_cast<int64_t>(dim)};
  else
    description.gradient_states = {{MeshAxis::etp, GradientState::partial_sum}};
  bias_ = register_described_parameter("bias", at::zeros(part, context.options), description);
  adds_bias_ = cut == Cut::out || etp.rank() == 0;
}

at::Tensor ExpertLinear::forward(const at::Tensor& x, const std::vector<int64_t>& rows) const {
  const at::Tensor y = grouped_linear(x, weight_.flatten(1, -2), rows);
  if (!bias_.defined()) return y;
  const at::Tensor own = adds_bias_ ? bias_ : bias_ * 0;
  return y +
         own.flatten(1).repeat_interleave(at::tensor(rows, at::kLong).to(x.device()), 0, x.size(0));
}

GroupedMLP::GroupedMLP(const LayerContext& context) : activation_(context.config.activation) {
  const TransformerConfig& config = context.config;
  const int64_t width = *config.moe_ffn_hidden_size;
  const bool gated = activation_ == Activation::swiglu;
  linear_fc1_ = register_module(
      "linear_fc1", std::make_shared<ExpertLinear>(
                        context.child("linear_fc1"),
                        gated ? std::vector<int64_t>{2, width} : std::vector<int64_t>{width},
                        config.hidden_size, ExpertLinear::Cut::out, config.init_method_std));
  linear_fc2_ = register_module(
      "linear_fc2", std::make_shared<ExpertLinear>(
                        context.child("linear_fc2"), std::vector<int64_t>{config.hidden_size},
                        width, ExpertLinear::Cut::in, output_layer_init_std(config)));
}

at::Tensor GroupedMLP::forward(const at::Tensor& tokens, const std::vector<int64_t>& rows) const {
  return linear_fc2_->forward(activate(activation_, linear_fc1_->forward(tokens, rows)), rows);
}

}  // namespace lockstep
