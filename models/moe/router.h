#pragma once

#include <memory>
#include <vector>

#include "lockstep/core/parameters.h"
#include "lockstep/models/layer_context.h"
#include "lockstep/models/router_losses.h"
#include "lockstep/models/routing.h"
#include "lockstep/models/token_positions.h"

namespace lockstep {

/// Chooses the experts of each token. Parameter: `weight` [num_experts, hidden_size], on every
/// rank, starts as normal values of standard deviation init_method_std. Buffer, with
/// moe_router_enable_expert_bias: `expert_bias` [num_experts] in fp32, the same on all ranks.
class TopKRouter : public DescribedModule {
 public:
  explicit TopKRouter(const LayerContext& context);
  /// `spec` as router_params() returns it.
  TopKRouter(const LayerContext& context, const ModuleSpec& spec);

  /// `hidden` [sequence, batch, hidden_size]: tokens that only this rank has; the tokens of the
  /// micro-batch are those of all ranks of tp and cp. While training, with gradients on, counts the
  /// choices and attaches the router's losses to the weights. With a capacity the micro-batch's
  /// tokens compete for it, in the order of their sequences: one all-gather of their weights over
  /// tp-cp. `padding` is of the same tokens, its count over tp and cp. `appended` is the number of
  /// padding tokens at the end of what the ranks of tp hold of each sequence that are not part of
  /// the sequence.
  Routing forward(const at::Tensor& hidden, const PaddingTokens& padding = {},
                  int64_t appended = 0) const;

  /// Undefined without moe_router_enable_expert_bias.
  const at::Tensor& expert_bias() const { return expert_bias_; }
  /// [num_experts] of int64: this rank's choices since they were set to zero.
  const at::Tensor& tokens_per_expert() const { return tokens_per_expert_; }

  double bias_update_rate() const { return config_.moe_router_bias_update_rate; }
  /// Whether the weight needs no gradient. The bias then stays as it is, too.
  bool is_frozen() const { return !weight_.requires_grad(); }

  /// Ends a step: forgets what global_aux_loss has counted, and a frozen router everything.
  void end_step();
  /// Abandons a step: forgets everything that its forwards have counted.
  void abandon_step();

 private:
  /// This rank's losses, [sequence, batch], as `padding` changes them; `loss` may be undefined.
  at::Tensor without_padding(const at::Tensor& loss, const PaddingTokens& padding) const;
  int64_t capacity(int64_t tokens) const;
  /// The choices of `routing` within a capacity of `most` tokens per expert.
  at::Tensor with_capacity(const Routing& routing, int64_t batch, int64_t most,
                           int64_t appended) const;

  TransformerConfig config_;
  ParallelState state_;
  std::shared_ptr<const TokenLossScale> loss_scale_;
  mutable RouterLosses losses_;
  at::Tensor weight_;
  at::Tensor expert_bias_;
  at::Tensor tokens_per_expert_;
};

/// The routers in `module`, in the order of its layers.
std::vector<std::shared_ptr<TopKRouter>> find_routers(const torch::nn::Module& module);

}  // namespace lockstep
