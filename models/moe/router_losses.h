#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

#include "lockstep/core/config.h"
#include "lockstep/models/routing.h"
#include "lockstep/models/token_loss_scale.h"
#include "lockstep/parallel_state/parallel_state.h"

namespace lockstep {

/// The terms that a router adds to the loss. All are losses per token, so that they sum over ranks
/// and micro-batches as the model's loss does. Every token has them except padding, also a token
/// whose label is ignored. If the gradients are divided by the number of labels
/// (ddp.calculate_per_token_loss), the terms count as their mean times tokens / labels, as in
/// Megatron Core on one rank of tp and cp; otherwise (TokenLossScale::averages) as their mean.
class RouterLosses {
 public:
  /// `device`: of the logits.
  RouterLosses(const TransformerConfig& config, const ParallelState& state, c10::Device device);

  /// The losses of each of this rank's tokens: [sequence, batch], undefined if there are none.
  ///
  /// - balancing: moe_aux_loss_coeff * experts * sum over e of f_e * share_e, where share is the
  ///   token's router_shares() and f_e the share of all choices that fell on expert e: over the
  ///   micro-batch (aux_loss), the token's sequence (seq_aux_loss), or all micro-batches of all
  ///   ranks since reset() (global_aux_loss). Its mean over the tokens is the coefficient if all
  ///   experts get the same share (Fedus et al., "Switch Transformers", 2021). Choices that
  ///   capacity drops count. What a token chooses is its top moe_router_topk by score, without
  ///   expert_bias and groups, as in Megatron Core and DeepSeek-V3: the bias makes its own choices
  ///   even, and a loss of these would have no gradient. Tokens that routing.map gives no expert do
  ///   not count.
  /// - z: moe_z_loss_coeff * log-sum-exp(logits)^2 (Zoph et al., "ST-MoE", 2022)
  ///
  /// The tokens of a micro-batch are on the ranks of tp and cp, all of which must call it: one
  /// all-reduce of the counts, over tp-cp, or tp-dp-cp for global_aux_loss.
  at::Tensor per_token(const at::Tensor& logits, const Routing& routing, int64_t sequence,
                       int64_t batch);

  /// Begins a new step of global_aux_loss.
  void reset();

 private:
  at::Tensor balancing(const at::Tensor& logits, const Routing& routing, int64_t sequence,
                       int64_t batch);

  TransformerConfig config_;
  ParallelState state_;
  /// global_aux_loss: [1, experts], choices since reset(). Not made in a forward, whose memory
  /// offloading may take away.
  at::Tensor counts_;
};

/// `x` itself; backward also computes the gradient of scale->value (null: 1) times loss.sum().
at::Tensor attach_loss(const at::Tensor& x, const at::Tensor& loss,
                       const std::shared_ptr<const TokenLossScale>& scale);

}  // namespace lockstep
