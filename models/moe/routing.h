#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>

#include "lockstep/core/config.h"

/// Which experts each token goes to: functions of tensors, without communication. Logits and scores
/// are [tokens, experts] in fp32, or fp64.
namespace lockstep {

/// The numbers that the host knows without reading the choices.
struct RoutingSizes {
  int64_t pairs;      ///< of a token and an expert that takes it, at most; equal on all ranks
  int64_t per_token;  ///< experts that take a token at a weight other than 0, at most
  bool all_taken;     ///< exactly per_token experts take each token, at any weight: pairs in all
};

/// A choice of experts.
struct Routing {
  at::Tensor probs;  ///< [tokens, experts]: weight of an expert's output, 0 where it is not chosen
  at::Tensor map;    ///< [tokens, experts] of bool: which experts take the token
  std::optional<RoutingSizes> known = {};

  /// `known`, or what holds for any choice.
  RoutingSizes sizes() const;
};

/// The scores that routing weights are made of: softmax over the experts, or the sigmoid.
at::Tensor router_scores(const at::Tensor& logits, RouterScoreFunction function);

/// The scores as shares of one, for the balancing loss: softmax over the experts, or the sigmoid
/// over its sum.
at::Tensor router_shares(const at::Tensor& logits, RouterScoreFunction function);

/// The top moe_router_topk experts of each token. Weights: with softmax, the softmax over the
/// chosen logits or, with moe_router_pre_softmax, the chosen scores; with sigmoid, the chosen
/// scores over their sum (the score itself if one is chosen); times moe_router_topk_scaling_factor.
/// `expert_bias` [experts], which may be undefined, is added to sigmoid scores only for the choice.
/// With moe_router_num_groups the experts form that many groups, and a token chooses within the
/// moe_router_group_topk of them whose topk / group_topk best scores have the largest sum
/// (DeepSeek-AI, "DeepSeek-V3", 2024). With softmax over the chosen logits these are sums of
/// logits, as in Megatron Core.
Routing route_tokens(const at::Tensor& logits, const TransformerConfig& config,
                     const at::Tensor& expert_bias = {});

/// Tokens that an expert takes: tokens * topk / experts * factor, rounded up.
int64_t expert_capacity(int64_t tokens, int64_t topk, int64_t experts, double factor);

/// The sizes after limit_to_capacity() for `tokens` of the tokens that compete, if `before` are
/// those for all of these.
RoutingSizes sizes_with_capacity(const RoutingSizes& before, int64_t tokens, int64_t experts,
                                 int64_t capacity, bool pad);

/// `map` of a routing in which each expert keeps the `capacity` tokens with the largest weights; of
/// those that are equal to within 2^-20, the first, so that rounding does not decide between tokens
/// that are the same in two sequences. With `pad` an expert that has fewer takes others, at weight
/// 0, so that each has `capacity` tokens; or all tokens, if there are not as many.
at::Tensor limit_to_capacity(const Routing& routing, int64_t capacity, bool pad);

}  // namespace lockstep
