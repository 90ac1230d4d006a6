#include "lockstep/models/moe_layer.h"

#include <ATen/ATen.h>

#include "lockstep/models/experts.h"
#include "lockstep/models/router.h"
#include "lockstep/models/token_dispatcher.h"
#include "lockstep/parallel_state/parallel_functions.h"

namespace lockstep {

MoELayer::MoELayer(const LayerContext& context, const ModuleSpec& spec)
    : tensor_parallel_(context.tensor_parallel()),
      sequence_parallel_(context.parallel.sequence_parallel),
      dispatcher_(make_token_dispatcher(context.config.moe_token_dispatcher_type, context.state,
                                        *context.config.num_experts)) {
  router_ = add_child<TopKRouter>(context, spec, "router");
  experts_ = add_child<GroupedMLP>(context, spec, "experts");
  if (context.config.moe_shared_expert_intermediate_size)
    shared_experts_ = add_child<MLP>(context, spec, "shared_experts");
}

MoELayer::MoELayer(const LayerContext& context)
    : MoELayer(context, moe_layer_params(context.settings())) {}

at::Tensor MoELayer::route_and_run(const at::Tensor& hidden,
                                   const std::function<void()>& meanwhile) const {
  const Routing routing = router_->forward(hidden);
  const auto run = [&](const at::Tensor& tokens, const RowGroupsPtr& groups) {
    return experts_->forward(tokens, groups);
  };
  return dispatcher_->run(hidden.flatten(0, 1), routing, run, meanwhile).view(hidden.sizes());
}

at::Tensor MoELayer::forward(const at::Tensor& hidden, const TokenPositions& tokens) const {
  const bool cut = tensor_parallel_.size() > 1 && !sequence_parallel_;
  at::Tensor shared;
  at::Tensor output =
      route_and_run(cut ? scatter_to_group(hidden, tensor_parallel_, 0, "tokens") : hidden, [&] {
        if (shared_experts_) shared = shared_experts_->forward(hidden, tokens);
      });
  if (cut)
    output = gather_from_group(output, tensor_parallel_, 0, GradientState::complete,
                               "outputs of the experts");
  return shared_experts_ ? output + shared : output;
}

}  // namespace lockstep
