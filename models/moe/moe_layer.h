#pragma once

#include <functional>
#include <memory>

#include "lockstep/models/hidden_check.h"
#include "lockstep/models/mlp.h"

namespace lockstep {

class GroupedMLP;
class MoETokenDispatcher;
class TopKRouter;

/// A mixture of experts in place of the feed-forward network. Children: `router`, `experts`, and
/// `shared_experts`, an MLP that every token takes, if moe_shared_expert_intermediate_size is set.
/// With moe_token_dispatcher_type = alltoall it runs while the tokens are on their way to their
/// experts, and its backward while their gradients are.
///
/// Between router and experts each rank has tokens of its own. With sequence parallelism this is
/// already so; without it a rank takes its share of the tokens that the ranks of tp have in common,
/// and an all-gather joins the outputs. Hence the sequence must be divisible by the ranks of tp,
/// except in a model that does not train: there the layer fills the sequence up with padding.
///
/// A training loop calls the functions of router_step.h in each step. The scale of the router's
/// losses is LayerContext::loss_scale.
class MoELayer : public FeedForward {
 public:
  explicit MoELayer(const LayerContext& context);
  /// `spec` as moe_layer_params() returns it.
  MoELayer(const LayerContext& context, const ModuleSpec& spec);

  /// UsageError, naming the layer: `hidden` of another shape or dtype.
  at::Tensor forward(const at::Tensor& hidden, const TokenPositions& tokens = {}) const override;

 private:
  at::Tensor route_and_run(const at::Tensor& hidden, const PaddingTokens& padding, int64_t missing,
                           const std::function<void()>& meanwhile) const;
  int64_t missing_tokens(int64_t sequence) const;
  PaddingTokens own_padding(const PaddingTokens& given, int64_t missing,
                            const at::Tensor& own) const;

  HiddenCheck check_;
  ProcessGroup tensor_parallel_;
  int64_t context_ranks_;
  bool sequence_parallel_;
  std::shared_ptr<TopKRouter> router_;
  std::shared_ptr<GroupedMLP> experts_;
  std::shared_ptr<MLP> shared_experts_;  ///< null without
  std::shared_ptr<const MoETokenDispatcher> dispatcher_;
};

}  // namespace lockstep
