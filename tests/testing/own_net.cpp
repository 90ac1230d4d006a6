#include "own_net.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn/functional/activation.h>

namespace own_net {

using namespace lockstep;
using lockstep::testing::RankLayout;
using lockstep::testing::StageInput;

namespace {

GradientState state_of_norm(const ParallelContext& context, Mistake mistake) {
  switch (mistake) {
    case Mistake::norm_declared_complete:
      return GradientState::complete;
    case Mistake::norm_declared_partial:
      return GradientState::partial_sum;
    case Mistake::norm_declared_mean:
      return GradientState::partial_mean;
    default:
      return context.replicated_gradient_state();
  }
}

ParamDescription cut(int64_t dim) { return {.placements = {{MeshAxis::tp, Shard{dim}}}}; }

ParamDescription replicated(GradientState over_tp) {
  return {.gradient_states = {{MeshAxis::tp, over_tp}}, .apply_weight_decay = false};
}

/// Token ids of a micro-batch with the labels after them: [samples of the rank, length + 1].
at::Tensor samples(const StageInput& input) {
  const ProcessGroup dp = input.context.state.group(GroupKind::dp);
  const at::Tensor i = at::arange(kSamples * (kLength + 1)).view({kSamples, kLength + 1});
  const at::Tensor number = i + 31 * input.step + 17 * input.microbatch;
  return (number * number + 3 * number).remainder(kTokens).chunk(dp.size(), 0)[dp.rank()];
}

}  // namespace

Block::Block(const ParallelContext& context, Mistake mistake)
    : context_(context), tp_(context.tensor_parallel()), mistake_(mistake) {
  const ParamOrigin origin = context.origin();
  const auto make = [&](const char* name, std::vector<int64_t> shape, double deviation,
                        ParamDescription description) {
    return add({name, std::move(shape), NormalValues{deviation}, std::move(description)}, origin);
  };
  norm_ = make("norm", {kWidth}, 1, replicated(state_of_norm(context, mistake)));
  if (mistake == Mistake::wrong_order_of_pieces) {
    in_ = make("in_weight", {2 * kInner, kWidth}, 0.5, cut(0));
    in_bias_ = make("in_bias", {2 * kInner}, 0.5, cut(0));
  } else {
    in_ = make("in_weight", {2, kInner, kWidth}, 0.5, cut(1));
    in_bias_ = make("in_bias", {2, kInner}, 0.5, cut(1));
  }
  if (mistake == Mistake::wrong_shard_dimension)
    out_ = register_described_parameter(
        "out_weight", at::randn({kWidth, kInner / tp_.size()}, at::kDouble), cut(0));
  else
    out_ = make("out_weight", {kWidth, kInner}, 0.5, cut(1));
  const bool added_before = mistake == Mistake::bias_on_every_rank;
  out_bias_ = make(
      "out_bias", {kWidth}, 0.5,
      replicated(added_before ? GradientState::complete : context.replicated_gradient_state()));
  torch::nn::Linear router(kWidth, 1);
  router->to(at::kDouble);
  router_ = mistake == Mistake::router_not_described
                ? register_module("router", router)
                : register_described_module("router", router, context.replicated_gradient_state());
}

at::Tensor Block::inner(const at::Tensor& normed) const {
  at::Tensor x = normed;
  if (context_.sequence_parallel)
    x = gather_from_group(normed, tp_, 0, GradientState::partial_sum, "normed");
  else if (mistake_ != Mistake::missing_copy_to_group)
    x = copy_to_group(normed, tp_, "normed");
  const at::Tensor both = at::linear(x, in_.view({-1, kWidth}), in_bias_.view({-1}));
  const std::vector<at::Tensor> parts = both.chunk(2, -1);
  at::Tensor terms = at::linear(at::silu(parts[0]) * parts[1], out_);
  if (mistake_ == Mistake::bias_on_every_rank) terms = terms + out_bias_;
  if (mistake_ == Mistake::missing_all_reduce) return terms + out_bias_;
  terms = context_.sequence_parallel ? reduce_scatter_to_group(terms, tp_, 0, "terms")
                                     : reduce_from_group(terms, tp_, "terms");
  return mistake_ == Mistake::bias_on_every_rank ? terms : terms + out_bias_;
}

at::Tensor Block::drop(const at::Tensor& hidden, const StageInput& input) const {
  uint64_t seed = context_.seed + static_cast<uint64_t>(100 * input.step + input.microbatch);
  if (mistake_ == Mistake::dropout_by_rank) seed += static_cast<uint64_t>(context_.state.rank());
  at::Generator generator = at::detail::createCPUGenerator(seed);
  const ProcessGroup dp = context_.state.group(GroupKind::dp);
  const at::Tensor all =
      at::bernoulli(at::full({kLength, kSamples, kWidth}, 0.75, at::kDouble), generator);
  at::Tensor mask = all.chunk(dp.size(), 1)[dp.rank()];
  if (context_.sequence_parallel) mask = mask.chunk(tp_.size(), 0)[tp_.rank()];
  return hidden * mask / 0.75;
}

at::Tensor Block::forward(const at::Tensor& hidden, const StageInput& input) {
  const at::Tensor weight = at::sigmoid(router_->forward(hidden));
  const at::Tensor scale = (hidden.square().mean(-1, true) + 1e-5).rsqrt();
  return hidden + drop(inner(hidden * scale * norm_) * weight, input);
}

Net::Net(const ParallelContext& context, Mistake mistake)
    : context_(context), tp_(context.tensor_parallel()), mistake_(mistake) {
  const ProcessGroup pipeline = context.state.group(GroupKind::pp);
  is_first_ = pipeline.rank() == 0;
  is_last_ = pipeline.rank() == pipeline.size() - 1;
  ParamDescription of_table = replicated(GradientState::complete);
  of_table.apply_weight_decay = true;
  if (pipeline.size() > 1 && mistake != Mistake::copies_not_tied)
    of_table.tie = Tie{"table", mistake == Mistake::tie_lacks_a_stage ? TiedStages::all
                                                                      : TiedStages::first_and_last};
  if (is_first_ || is_last_) {
    table_ = add({"table", {kTokens, kWidth}, NormalValues{0.5}, of_table}, context.origin());
    table_view_ = table_.t();
  }
  const int64_t blocks = kBlocks / pipeline.size();
  for (int64_t i = pipeline.rank() * blocks; i < (pipeline.rank() + 1) * blocks; ++i)
    blocks_.push_back(
        add_child<Block>(context, "block" + std::to_string(i), i == 1 ? mistake : Mistake::none));
}

at::Tensor Net::loss(const at::Tensor& hidden, const at::Tensor& labels) const {
  const at::Tensor x = context_.sequence_parallel
                           ? gather_from_group(hidden, tp_, 0, GradientState::complete, "hidden")
                           : hidden;
  const at::Tensor logits =
      mistake_ == Mistake::used_through_a_view ? at::matmul(x, table_view_) : at::linear(x, table_);
  return at::cross_entropy_loss(
      logits.flatten(0, 1), labels.t().flatten(), {},
      mistake_ == Mistake::mean_loss ? at::Reduction::Mean : at::Reduction::Sum);
}

at::Tensor Net::forward(const StageInput& input) {
  const at::Tensor ids = samples(input);
  at::Tensor hidden = input.hidden;
  if (is_first_) {
    hidden = at::embedding(table_, ids.narrow(1, 0, kLength).t());
    if (context_.sequence_parallel) hidden = scatter_to_group(hidden, tp_, 0, "embedded");
  }
  for (const auto& block : blocks_) hidden = block->forward(hidden, input);
  return is_last_ ? loss(hidden, ids.narrow(1, 1, kLength)) : hidden;
}

std::vector<Case> mistakes() {
  const RankLayout tp = {.ranks = 2, .sizes = {.tensor = 2}};
  const RankLayout sp = {.ranks = 2, .sizes = {.tensor = 2}, .sequence_parallel = true};
  const RankLayout dp = {.ranks = 2};
  const RankLayout pp = {.ranks = 2, .sizes = {.pipeline = 2}};
  const RankLayout pp4 = {.ranks = 4, .sizes = {.pipeline = 4}};
  using enum Mistake;
  return {{"missing all-reduce in forward", missing_all_reduce, tp, "block1.out_weight",
           "an all-reduce (reduce_from_group) is missing after it"},
          {"missing all-reduce in backward", missing_copy_to_group, tp, "block1.norm",
           "an all-reduce of backward (copy_to_group) is missing after it"},
          {"wrong gradient state: complete", norm_declared_complete, sp, "block1.norm",
           "it is declared complete and each rank of tp holds a term of the sum"},
          {"wrong gradient state: partial-sum", norm_declared_partial, tp, "block1.norm",
           "the gradient is 2 times what it should be over tp: it is declared partial-sum and its "
           "gradient is complete already"},
          {"mean in the place of a sum: gradient state", norm_declared_mean, sp, "block1.norm",
           "the gradient is 1/2 of what it should be over tp: it is declared partial-mean"},
          {"copies on two stages that are not tied", copies_not_tied, pp, "table",
           "its description does not tie them"},
          {"tie without a stage", tie_lacks_a_stage, pp4, "table", "holds no copy that is trained"},
          {"mean in the place of a sum: loss", mean_loss, dp, "table",
           "2 times what it should be over dp-cp: the ranks' losses are means"},
          {"bias added on every rank", bias_on_every_rank, tp, "block1.out_bias",
           "so that it counts 2 times"},
          {"router not described", router_not_described, sp, "block1.router.weight",
           "does not declare the state of its gradient over tp"},
          {"parameter used outside of its owner", used_through_a_view, dp, "table",
           "used through a tensor that is not the parameter"},
          {"dropout with the wrong stream", dropout_by_rank, tp, "block1.out_bias",
           "aten::bernoulli between them draws from another random stream"},
          {"wrong shard dimension", wrong_shard_dimension, tp, "block1.out_weight",
           "described as Shard(0) over tp"},
          {"wrong order of the pieces", wrong_order_of_pieces, tp, "block1.in_weight",
           "the order of the pieces between them is wrong"},
          {"forgotten finalize_model_grads", forgotten_finalize, sp, "block3.out_bias",
           "finalize_model_grads() was not called"}};
}

lockstep::testing::LayoutReport check(Mistake mistake, const std::vector<RankLayout>& layouts) {
  lockstep::testing::CheckOptions options;
  if (mistake == Mistake::forgotten_finalize)
    options.finalize = [](auto& /*module*/, auto& /*ddp*/, const auto& /*num_tokens*/) {};
  return lockstep::testing::check_layouts(
      [mistake](const ParallelContext& context) { return std::make_shared<Net>(context, mistake); },
      [](Net& net, const StageInput& input) { return net.forward(input); }, layouts, options);
}

std::vector<RankLayout> good_layouts() {
  return {{.ranks = 1},
          {.ranks = 2},
          {.ranks = 4},
          {.ranks = 2, .sizes = {.tensor = 2}},
          {.ranks = 2, .sizes = {.tensor = 2}, .sequence_parallel = true},
          {.ranks = 3, .sizes = {.tensor = 3}, .sequence_parallel = true},
          {.ranks = 4, .sizes = {.tensor = 4}},
          {.ranks = 4, .sizes = {.tensor = 2}, .sequence_parallel = true},
          {.ranks = 2, .sizes = {.pipeline = 2}},
          {.ranks = 4, .sizes = {.pipeline = 4}},
          {.ranks = 4, .sizes = {.tensor = 2, .pipeline = 2}, .sequence_parallel = true},
          {.ranks = 8, .sizes = {.tensor = 2, .pipeline = 2}, .sequence_parallel = true}};
}

}  // namespace own_net
