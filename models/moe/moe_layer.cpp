#include "lockstep/models/moe_layer.h"

#include <ATen/ATen.h>

#include "lockstep/models/experts.h"
#include "lockstep/models/router.h"
#include "lockstep/models/token_dispatcher.h"
#include "lockstep/parallel_state/parallel_functions.h"

namespace lockstep {

MoELayer::MoELayer(const LayerContext& context, const ModuleSpec& spec)
    : check_(context, "MoELayer"),
      tensor_parallel_(context.tensor_parallel()),
      context_ranks_(context.state.grids().size(GroupKind::cp)),
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

at::Tensor MoELayer::route_and_run(const at::Tensor& hidden, const PaddingTokens& padding,
                                   int64_t missing, const std::function<void()>& meanwhile) const {
  const Routing routing = router_->forward(hidden, padding, missing);
  const auto run = [&](const at::Tensor& tokens, const RowGroupsPtr& groups) {
    return experts_->forward(tokens, groups);
  };
  return dispatcher_->run(hidden.flatten(0, 1), routing, run, meanwhile).view(hidden.sizes());
}

/// The number of tokens to append to `sequence` so that tp can cut it.
int64_t MoELayer::missing_tokens(int64_t sequence) const {
  const int64_t ranks = tensor_parallel_.size();
  return is_training() || sequence_parallel_ ? 0 : (ranks - sequence % ranks) % ranks;
}

/// The padding of `own`, this rank's tokens. The ranks of tp have `missing` more than `given` is of
/// at the end of each sequence. The router refuses a map of another form.
PaddingTokens MoELayer::own_padding(const PaddingTokens& given, int64_t missing,
                                    const at::Tensor& own) const {
  const int64_t rows = own.size(0), batch = own.size(1), all = rows * tensor_parallel_.size();
  PaddingTokens padding = given;
  if (missing > 0) {
    const auto options = own.options().dtype(at::kBool);
    if (!padding.map.defined()) padding.map = at::zeros({all - missing, batch}, options);
    padding.map = at::cat({padding.map, at::ones({missing, batch}, options)});
    padding.count += missing * batch * context_ranks_;
  }
  if (padding.map.defined() && padding.map.dim() > 0 && padding.map.size(0) == all)
    padding.map = padding.map.narrow(0, tensor_parallel_.rank() * rows, rows);
  return padding;
}

at::Tensor MoELayer::forward(const at::Tensor& hidden, const TokenPositions& tokens) const {
  check_(hidden);
  const bool cut = tensor_parallel_.size() > 1 && !sequence_parallel_;
  const int64_t sequence = hidden.size(0), missing = missing_tokens(sequence);
  const at::Tensor whole =
      missing > 0 ? at::constant_pad_nd(hidden, {0, 0, 0, 0, 0, missing}) : hidden;
  const at::Tensor own = cut ? scatter_to_group(whole, tensor_parallel_, 0, "tokens") : whole;
  at::Tensor shared;
  at::Tensor output = route_and_run(own, own_padding(tokens.padding, missing, own), missing, [&] {
    if (shared_experts_) shared = shared_experts_->forward(hidden, tokens);
  });
  if (cut)
    output = gather_from_group(output, tensor_parallel_, 0, GradientState::complete,
                               "outputs of the experts");
  if (missing > 0) output = output.narrow(0, 0, sequence);
  return shared_experts_ ? output + shared : output;
}

}  // namespace lockstep
