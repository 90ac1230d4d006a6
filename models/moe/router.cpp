#include "lockstep/models/router.h"

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/models/context_parallel.h"
#include "lockstep/models/input_check.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {
namespace {

/// Reorders `gathered`, which has a chunk for each rank of tp-cp, by rank in cp, then in tp.
at::Tensor by_place(const at::Tensor& gathered, const ProcessGroup& group, const RankGrids& grids) {
  const RankGroups tp = grids.groups(GroupKind::tp), cp = grids.groups(GroupKind::cp);
  const auto chunks = gathered.chunk(group.size(), 0);
  std::vector<at::Tensor> places(chunks.size());
  for (size_t i = 0; i < chunks.size(); ++i) {
    const int64_t rank = group.ranks()[i];
    places[static_cast<size_t>(*cp.position_of(rank) * tp.size() + *tp.position_of(rank))] =
        chunks[i];
  }
  return at::cat(places);
}

}  // namespace

TopKRouter::TopKRouter(const LayerContext& context, const ModuleSpec& spec)
    : config_(context.config),
      state_(context.state),
      loss_scale_(context.loss_scale),
      losses_(context.config, context.state, context.options.device()) {
  weight_ = add(spec.at("weight"), context.origin());
  if (config_.moe_expert_capacity_factor) state_.group(GroupKind::tp_cp);
  if (!config_.moe_router_enable_expert_bias) return;
  const int64_t experts = *config_.num_experts;
  expert_bias_ =
      register_buffer("expert_bias", at::zeros({experts}, context.options.dtype(at::kFloat)));
  tokens_per_expert_ = at::zeros({experts}, context.options.dtype(at::kLong));
}

TopKRouter::TopKRouter(const LayerContext& context)
    : TopKRouter(context, router_params(context.settings())) {}

at::Tensor TopKRouter::without_padding(const at::Tensor& loss, const PaddingTokens& padding) const {
  if (!loss.defined()) return loss;
  const at::Tensor own = padding.map.defined() ? loss.masked_fill(padding.map, 0.0) : loss;
  const int64_t tokens = loss.numel() * state_.grids().size(GroupKind::tp_cp);
  const int64_t others = tokens - padding.count;
  const bool averages = loss_scale_ && loss_scale_->averages && padding.count > 0 && others > 0;
  return averages ? own * (static_cast<double>(tokens) / static_cast<double>(others)) : own;
}

int64_t TopKRouter::capacity(int64_t tokens) const {
  return expert_capacity(tokens, config_.moe_router_topk, *config_.num_experts,
                         *config_.moe_expert_capacity_factor);
}

at::Tensor TopKRouter::with_capacity(const Routing& routing, int64_t batch, int64_t most,
                                     int64_t appended) const {
  const ProcessGroup group = state_.group(GroupKind::tp_cp);
  const int64_t experts = routing.probs.size(1);
  const bool pad = config_.moe_pad_expert_input_to_capacity;
  if (group.size() == 1) return limit_to_capacity(routing, most, pad);
  // The sign tells experts that are not chosen from weights of zero.
  const at::Tensor own = routing.probs.detach().masked_fill(~routing.map, -1.0).contiguous();
  const at::Tensor gathered = at::empty({group.size() * own.size(0), experts}, own.options());
  all_gather(group, gathered, own, "routing weights").wait();
  const ProcessGroup tp = state_.group(GroupKind::tp), cp = state_.group(GroupKind::cp);
  const at::Tensor parts =
      by_place(gathered, group, state_.grids()).view({cp.size(), -1, batch, experts});
  const at::Tensor whole =
      to_sequence_order(parts.narrow(1, 0, parts.size(1) - appended).flatten(0, 1), cp.size())
          .flatten(0, 1);
  const at::Tensor map = limit_to_capacity({whole.clamp_min(0), whole.ge(0)}, most, pad);
  at::Tensor part = cut_for_context(map.view({-1, batch, experts}), 0, cp);
  if (appended > 0) part = at::constant_pad_nd(part, {0, 0, 0, 0, 0, appended});
  return part.chunk(tp.size(), 0)[static_cast<size_t>(tp.rank())].flatten(0, 1);
}

void TopKRouter::end_step() { is_frozen() ? abandon_step() : losses_.reset(); }

void TopKRouter::abandon_step() {
  losses_.reset();
  if (tokens_per_expert_.defined()) tokens_per_expert_.detach().zero_();
}

Routing TopKRouter::forward(const at::Tensor& hidden, const PaddingTokens& padding,
                            int64_t appended) const {
  const int64_t sequence = hidden.size(0), batch = hidden.size(1);
  if (const at::Tensor& map = padding.map; map.defined())
    require<UsageError>(map.sizes() == hidden.sizes().slice(0, 2) && map.scalar_type() == at::kBool,
                        "router: found a map of padding {}, allowed: [{}, {}] of Bool",
                        form_of(map), sequence, batch);
  const auto wide = hidden.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor logits = at::linear(hidden.flatten(0, 1).to(wide), weight_.to(wide));
  Routing routing = route_tokens(logits, config_, expert_bias_);
  const Routing counted = {routing.probs,
                           padding.map.defined()
                               ? routing.map.masked_fill(padding.map.reshape({-1, 1}), false)
                               : routing.map,
                           routing.known};
  if (is_training() && at::GradMode::is_enabled()) {
    if (tokens_per_expert_.defined()) {
      at::Tensor counter = tokens_per_expert_;
      counter.add_(counted.map.sum(0));
    }
    const at::Tensor loss =
        without_padding(losses_.per_token(logits, counted, sequence, batch), padding);
    if (loss.defined()) routing.probs = attach_loss(routing.probs, loss, loss_scale_);
  }
  if (config_.moe_expert_capacity_factor) {
    const int64_t tokens = routing.map.size(0) * state_.group(GroupKind::tp_cp).size();
    const int64_t most = capacity(tokens - padding.count), most_of_any = capacity(tokens);
    routing.map = with_capacity(counted, batch, most, appended);
    routing.probs = routing.probs.masked_fill(~routing.map, 0.0);
    routing.known = sizes_with_capacity(routing.sizes(), routing.map.size(0), *config_.num_experts,
                                        most_of_any, config_.moe_pad_expert_input_to_capacity);
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
