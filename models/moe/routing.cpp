#include "lockstep/models/routing.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <ATen/ATen.h>

namespace lockstep {
namespace {

constexpr double kWeightSteps = 1 << 20;
constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

/// What experts are chosen by. A softmax keeps the order of the logits, but not that of the groups'
/// sums.
at::Tensor preference_of(const at::Tensor& logits, const TransformerConfig& config) {
  const RouterScoreFunction function = config.moe_router_score_function;
  const bool softmax_of_chosen =
      function == RouterScoreFunction::softmax && !config.moe_router_pre_softmax;
  if (config.moe_router_num_groups && softmax_of_chosen) return logits;
  return router_scores(logits, function);
}

/// `scores`, with minus infinity outside the best groups.
at::Tensor within_best_groups(const at::Tensor& scores, const TransformerConfig& config) {
  if (!config.moe_router_num_groups) return scores;
  const int64_t groups = *config.moe_router_num_groups, best = *config.moe_router_group_topk;
  const at::Tensor grouped = scores.unflatten(1, {groups, scores.size(1) / groups});
  const at::Tensor sums = std::get<0>(grouped.topk(config.moe_router_topk / best, -1)).sum(-1);
  const at::Tensor chosen = std::get<1>(sums.topk(best, -1));
  const at::Tensor outside =
      at::ones(sums.sizes(), scores.options().dtype(at::kBool)).scatter_(1, chosen, false);
  return grouped.masked_fill(outside.unsqueeze(-1), kMinusInfinity).flatten(1);
}

at::Tensor weights_of(const at::Tensor& logits, const at::Tensor& chosen,
                      const TransformerConfig& config) {
  const bool softmax = config.moe_router_score_function == RouterScoreFunction::softmax;
  if (softmax && !config.moe_router_pre_softmax) return logits.gather(1, chosen).softmax(-1);
  const at::Tensor scores =
      router_scores(logits, config.moe_router_score_function).gather(1, chosen);
  if (softmax || config.moe_router_topk == 1) return scores;
  return scores / (scores.sum(-1, /*keepdim=*/true) + 1e-20);
}

}  // namespace

RoutingSizes Routing::sizes() const {
  return known.value_or(RoutingSizes{map.numel(), map.size(1), false});
}

at::Tensor router_scores(const at::Tensor& logits, RouterScoreFunction function) {
  return function == RouterScoreFunction::softmax ? logits.softmax(-1) : logits.sigmoid();
}

at::Tensor router_shares(const at::Tensor& logits, RouterScoreFunction function) {
  const at::Tensor scores = router_scores(logits, function);
  if (function == RouterScoreFunction::softmax) return scores;
  return scores / (scores.sum(-1, /*keepdim=*/true) + 1e-20);
}

Routing route_tokens(const at::Tensor& logits, const TransformerConfig& config,
                     const at::Tensor& expert_bias) {
  at::Tensor preference = preference_of(logits.detach(), config);
  if (expert_bias.defined()) preference = preference + expert_bias.to(preference.scalar_type());
  preference = within_best_groups(preference, config);
  const at::Tensor chosen = std::get<1>(preference.topk(config.moe_router_topk, 1));
  at::Tensor weights = weights_of(logits, chosen, config);
  if (config.moe_router_topk_scaling_factor)
    weights = weights * *config.moe_router_topk_scaling_factor;
  return {at::zeros_like(logits.detach()).scatter(1, chosen, weights),
          at::zeros(logits.sizes(), logits.options().dtype(at::kBool)).scatter_(1, chosen, true),
          RoutingSizes{logits.size(0) * config.moe_router_topk, config.moe_router_topk, true}};
}

int64_t expert_capacity(int64_t tokens, int64_t topk, int64_t experts, double factor) {
  constexpr double kMost = 0x1p62;
  return static_cast<int64_t>(std::min(
      std::ceil(static_cast<double>(tokens * topk) / static_cast<double>(experts) * factor),
      kMost));
}

RoutingSizes sizes_with_capacity(const RoutingSizes& before, int64_t tokens, int64_t experts,
                                 int64_t capacity, bool pad) {
  const int64_t taken = experts * std::min(capacity, tokens);
  return {pad ? taken : std::min(taken, before.pairs), before.per_token, false};
}

at::Tensor limit_to_capacity(const Routing& routing, int64_t capacity, bool pad) {
  const at::Tensor preference =
      (routing.probs.detach() * kWeightSteps).round().masked_fill(~routing.map, kMinusInfinity);
  const int64_t kept = std::min(capacity, preference.size(0));
  const at::Tensor chosen =
      std::get<1>(at::sort(preference, /*stable=*/true, /*dim=*/0, /*descending=*/true))
          .narrow(0, 0, kept);
  const at::Tensor map = at::zeros_like(routing.map).scatter_(0, chosen, true);
  return pad ? map : map.logical_and(routing.map);
}

}  // namespace lockstep
