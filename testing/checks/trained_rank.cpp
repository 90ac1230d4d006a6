#include "lockstep/testing/trained_rank.h"

#include <ATen/ATen.h>

#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/parallel_state/pipeline_position.h"
#include "lockstep/pipeline/executor.h"
#include "lockstep/testing/param_pieces.h"
#include "lockstep/testing/whole_model.h"

namespace lockstep::testing {

namespace {

ParallelContext context_of(const ParallelState& state, uint64_t seed, bool sequence_parallel) {
  return {
      .state = state, .options = at::kDouble, .seed = seed, .sequence_parallel = sequence_parallel};
}

}  // namespace

WholeWeights weights_in_one_process(const MakeModule& make, uint64_t seed) {
  const ParallelState state = ParallelState::single_process();
  const auto module = make_whole_model(make, context_of(state, seed, false));
  WholeWeights weights;
  for (const NamedParameter& param : collect_parameters(*module))
    weights[param.name] = param.tensor.detach().clone();
  return weights;
}

TrainedRank::TrainedRank(const MakeModule& make, const StageLoss& loss, const RankLayout& layout,
                         const CheckOptions& options, const ParallelState& state,
                         const WholeWeights& weights)
    : loss_(loss),
      options_(options),
      state_(state),
      context_(context_of(state, options.seed, layout.sequence_parallel)),
      module_(make(context_)) {
  module_->train();
  assign_pieces(collect_parameters(*module_), weights, state.grids(), state.rank());
  ddp_.emplace(*module_, state_, options.ddp, /*disable_bucketing=*/false, options.matrices());
  ddp_->set_num_microbatches(options.microbatches);
  optimizer_.emplace(std::vector{&*ddp_}, options.optimizer, options.overrides, options.rule);
}

double TrainedRank::step(int64_t number) {
  ddp_->zero_grad();
  const RankGrids& grids = state_.grids();
  const bool has_loss = PipelinePosition(grids, state_.rank()).is_last_stage();
  at::Tensor total = at::zeros({}, at::kDouble);
  const PipelineExecutor executor(state_, make_schedule({.pipeline = grids.size(GroupKind::pp),
                                                         .microbatches = options_.microbatches}));
  executor.run({[&](int64_t microbatch, const at::Tensor& hidden) {
    const at::Tensor output = loss_(*module_, {context_, number, microbatch, hidden});
    if (has_loss) total += output.detach().sum();
    return output;
  }});
  const bool per_token = ddp_->scaling_mode() == GradientScalingMode::per_token;
  std::optional<at::Tensor> tokens;
  if (per_token)
    tokens =
        at::full({}, grids.groups(GroupKind::dp_cp).position_of(state_.rank()) == 0 ? 1.0 : 0.0,
                 at::kDouble);
  if (options_.finalize)
    options_.finalize(*module_, *ddp_, tokens);
  else
    finalize_model_grads({&*ddp_}, tokens);
  optimizer_->step();
  ddp_->finish_param_sync();
  if (!per_token) total /= static_cast<double>(grids.size(GroupKind::dp_cp));
  for (const GroupKind kind : {GroupKind::dp_cp, GroupKind::pp})
    all_reduce(state_.group(kind), total, ReduceOp::sum, kLossOfStep).wait();
  return total.item<double>();
}

std::vector<StateTensor> TrainedRank::state_tensors() {
  ddp_->unshard();
  std::vector<StateTensor> tensors = model_state(*module_, state_);
  for (StateTensor& tensor : optimizer_state(*optimizer_, state_))
    tensors.push_back(std::move(tensor));
  return tensors;
}

}  // namespace lockstep::testing
