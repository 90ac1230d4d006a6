#include "lockstep/models/layers/moe/router.h"

#include <ATen/ATen.h>

#include "lockstep/parallel_state/collectives.h"

namespace lockstep {

TopKRouter::TopKRouter(const LayerContext& context)
    : config_(context.config),
      state_(context.state),
      loss_scale_(context.loss_scale),
      losses_(context.config, context.state) {
  const int64_t experts = *config_.num_experts;
  at::Tensor weight = at::empty({experts, config_.hidden_size}, context.options);
  fill_normal(weight, config_.init_method_std, context.seed, context.name + "weight",
              weight.sizes());
  // The tokens are cut over tp here, with sequence parallelism or without.
  weight_ = register_described_parameter(
      "weight", weight, {.gradient_states = {{MeshAxis::tp, GradientState::partial_sum}}});
  if (config_.moe_expert_capacity_factor) state_.group(GroupKind::tp_cp);
  if (!config_.moe_router_enable_expert_bias) return;
  expert_bias_ =
      register_buffer("expert_bias", at::zeros({experts}, context.options.dtype(at::kFloat)));
  tokens_per_expert_ = at::zeros({experts}, context.options.dtype(at::kLong));
}

at::Tensor TopKRouter::with_capacity(const Routing& routing) const {
  const ProcessGroup group = state_.group(GroupKind::tp_cp);
  const int64_t tokens = routing.probs.size(0), all_tokens = tokens * group.size();
  const int64_t capacity =
      expert_capacity(all_tokens, config_.moe_router_topk, *config_.num_experts,
                      *config_.moe_expert_capacity_factor);
  Routing all = routing;
  if (group.size() > 1) {
    // What is not chosen is told from a weight of zero by its sign.
    const at::Tensor own = routing.probs.detach().masked_fill(~routing.map, -1.0).contiguous();
    const at::Tensor gathered = at::empty({all_tokens, own.size(1)}, own.options());
    all_gather(group, gathered, own, "routing weights").wait();
    all = {gathered.clamp_min(0), gathered.ge(0)};
  }
  return limit_to_capacity(all, capacity, config_.moe_pad_expert_input_to_capacity)
      .narrow(0, group.rank() * tokens, tokens);
}

Routing TopKRouter::forward(const at::Tensor& hidden) const {
  const int64_t sequence = hidden.size(0), batch = hidden.size(1);
  const auto wide = hidden.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor logits = at::linear(hidden.flatten(0, 1).to(wide), weight_.to(wide));
  Routing routing = route_tokens(logits, config_, expert_bias_);
  if (is_training() && at::GradMode::is_enabled()) {
    if (tokens_per_expert_.defined()) {
      at::Tensor counter = tokens_per_expert_;
      counter.add_(routing.map.sum(0));
    }
    const at::Tensor loss = losses_.per_token(logits, routing, sequence, batch);
    if (loss.defined()) routing.probs = attach_loss(routing.probs, loss, loss_scale_);
  }
  if (config_.moe_expert_capacity_factor) {
    routing.map = with_capacity(routing);
    routing.probs = routing.probs.masked_fill(~routing.map, 0.0);
  }
  return routing;
}

std::vector<std::shared_ptr<TopKRouter>> find_routers(const torch::nn::Module& module) {
  std::vector<std::shared_ptr<TopKRouter>> routers;
  for (const auto& child : module.children()) {
    if (auto router = std::dynamic_pointer_cast<TopKRouter>(child)) routers.push_back(router);
    for (const auto& below : find_routers(*child)) routers.push_back(below);
  }
  return routers;
}

}  // namespace lockstep
