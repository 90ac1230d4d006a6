// Modules of libtorch inside a described one, between the tensor-parallel regions. Their gradients
// are compared with the same model from libtorch's operators in one process, in fp64.

#include <gtest/gtest.h>

#include <functional>
#include <map>

#include <ATen/ATen.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include "lockstep/core/error.h"
#include "lockstep/distributed/all_reduce_grads.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/distributed/gradient_synchronizer.h"
#include "lockstep/distributed/reducer.h"
#include "lockstep/models/linear.h"
#include "lockstep/optimizer/clip_grad_norm.h"
#include "lockstep/tests/support/gpt_parts.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::difference;
using testing::join_parts;
using testing::NamedTensors;
using testing::run_ranks;
using testing::throws_with;

constexpr int64_t kLength = 4, kBatch = 3, kWidth = 6, kInner = 8;

/// norm and mix are libtorch's, inner and outer are ours.
class MixedNet : public DescribedModule {
 public:
  enum class Children { undescribed, stated, by_parameter };

  MixedNet(const ParallelContext& context, Children children) {
    const GradientState over_tp = context.replicated_gradient_state();
    if (children == Children::undescribed) {
      norm_ = register_module("norm", make_norm());
      mix_ = register_module("mix", make_mix());
    } else if (children == Children::stated) {
      norm_ = register_described_module("norm", make_norm(), over_tp);
      mix_ = register_described_module("mix", make_mix(), over_tp);
    } else {
      ParamDescription weight = {.gradient_states = {{MeshAxis::tp, over_tp}}}, bias = weight;
      bias.apply_weight_decay = false;
      norm_ = register_described_module("norm", make_norm(), {{"weight", bias}, {"bias", bias}});
      mix_ = register_described_module("mix", make_mix(), {{"weight", weight}, {"bias", bias}});
    }
    inner_ =
        add_child<ColumnParallelLinear>(context, "inner", kWidth, std::vector{kInner}, true, .4);
    outer_ = add_child<RowParallelLinear>(context, "outer", kInner, kWidth, true, .4);
  }

  at::Tensor forward(const at::Tensor& input) {
    const at::Tensor hidden = mix_(norm_(input));
    return hidden + outer_->forward(at::gelu(inner_->forward(hidden)));
  }

 private:
  static torch::nn::LayerNorm make_norm() {
    torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({kWidth}));
    return filled(norm);
  }
  static torch::nn::Linear make_mix() {
    torch::nn::Linear mix(kWidth, kWidth);
    return filled(mix);
  }
  template <class Module>
  static Module filled(Module module) {
    const at::NoGradGuard no_grad;
    module->to(at::kDouble);
    for (auto& item : module->named_parameters())
      fill_normal(item.value(), 0.5, 7, item.key(), item.value().sizes());
    return module;
  }

  torch::nn::LayerNorm norm_{nullptr};
  torch::nn::Linear mix_{nullptr};
  std::shared_ptr<ColumnParallelLinear> inner_;
  std::shared_ptr<RowParallelLinear> outer_;
};

ParallelContext context_of(const ParallelState& state, bool sequence_parallel) {
  return {.state = state, .options = at::kDouble, .sequence_parallel = sequence_parallel};
}

TEST(PlainChildren, AreRefusedByNameWhereRanksOfTpSeeTheirTokensAlone) {
  const std::function<void(const MixedNet&, const ParallelState&)> fronts[] = {
      [](auto& net, auto& state) { DistributedDataParallel(net, state); },
      [](auto& net, auto& state) { GradientSynchronizer(net, state, 1, 1).bind(); },
      [](auto& net, auto&) { GradientSynchronizer({MeshParameters(net)}, 1, 1).bind(); },
      [](auto& net, auto& state) { all_reduce_grads(net, state); },
      [](auto& net, auto& state) {
        all_reduce_grads(net, DeviceMesh(state, {1, 1, 2}, {"dp", "cp", "tp"}), false);
      },
      [](auto& net, auto& state) { clip_grad_norm_(net, state, 1); },
      [](auto& net, auto& state) { Reducer(net, state); },
      [](auto& net, auto& state) { Reducer(net, state.group(GroupKind::dp_cp)); },
  };
  for (size_t i = 0; i < std::size(fronts); ++i)
    run_ranks(2,
              [&](const ParallelState& state) {
                const MixedNet net(context_of(state, true), MixedNet::Children::undescribed);
                EXPECT_TRUE(throws_with<UsageError>([&] { fronts[i](net, state); },
                                                    "parameter 'norm.weight': its module does not "
                                                    "declare the state of its gradient over tp"))
                    << "front " << i;
              },
              {.sizes = {.tensor = 2}});
}

/// The loss of the whole input, computed only by operators of libtorch.
at::Tensor plain_loss(const NamedTensors& p, const at::Tensor& input) {
  const at::Tensor hidden =
      at::linear(at::layer_norm(input, {kWidth}, p.at("norm.weight"), p.at("norm.bias"), 1e-5),
                 p.at("mix.weight"), p.at("mix.bias"));
  const at::Tensor inner = at::gelu(at::linear(hidden, p.at("inner.weight"), p.at("inner.bias")));
  return (hidden + at::linear(inner, p.at("outer.weight"), p.at("outer.bias"))).pow(3).sum();
}

at::Tensor input_of(int64_t replica) {
  const double phase = 3. * static_cast<double>(replica);
  return at::sin(at::arange(kLength * kBatch * kWidth, at::kDouble) * 0.7 + phase)
      .view({kLength, kBatch, kWidth});
}

/// Gradients of the sum over `replicas` inputs, in one process.
NamedTensors expected_gradients(int64_t replicas) {
  const MixedNet net({.options = at::kDouble}, MixedNet::Children::undescribed);
  NamedTensors params, gradients;
  for (const auto& item : net.named_parameters())
    params[item.key()] = item.value().detach().clone().requires_grad_(true);
  for (int64_t i = 0; i < replicas; ++i) plain_loss(params, input_of(i)).backward();
  for (const auto& [name, param] : params) gradients[name] = param.grad();
  return gradients;
}

/// Runs backward of this rank's part of its replica's loss.
void backward(MixedNet& net, const ParallelState& state, bool sequence_parallel) {
  const ProcessGroup tp = state.group(GroupKind::tp);
  at::Tensor input = input_of(state.group(GroupKind::dp_cp).rank());
  if (sequence_parallel)
    input = input.chunk(tp.size(), 0)[static_cast<size_t>(tp.rank())].contiguous();
  net.forward(input).pow(3).sum().backward();
}

void expect_gradients(const MixedNet& net, const ParallelState& state, double factor) {
  const ProcessGroup tp = state.group(GroupKind::tp);
  NamedTensors found;
  for (const NamedParameter& param : collect_parameters(net))
    found[param.name] = join_parts(param.description, param.tensor.grad(), tp) * factor;
  const NamedTensors expected = expected_gradients(state.group(GroupKind::dp_cp).size());
  for (const auto& [name, gradient] : expected)
    EXPECT_LT(difference(found.at(name), gradient), 1e-12) << name;
  EXPECT_EQ(found.size(), expected.size());
}

void check_fronts(const ParallelState& state, bool sequence, MixedNet::Children children) {
  const ParallelContext context = context_of(state, sequence);
  const auto replicas = static_cast<double>(state.group(GroupKind::dp_cp).size());
  MixedNet wrapped(context, children), synchronized(context, children), averaged(context, children);
  DistributedDataParallel ddp(wrapped, state);
  backward(wrapped, state, sequence);
  const FinalizeReport report = finalize_model_grads({&ddp}, at::zeros({}));
  expect_gradients(wrapped, state, 1);
  int64_t bytes = 0, parameters = 0;
  for (const FinalizeReport::Entry& entry : report.entries)
    if (entry.pass == "partial gradients") {
      EXPECT_EQ(entry.group.ranks(), state.group(GroupKind::tp).ranks());
      bytes += entry.bytes;
      parameters += entry.parameters;
    }
  // norm.weight, norm.bias, mix.bias, outer.bias, mix.weight
  EXPECT_EQ(parameters, sequence ? 5 : 0);
  EXPECT_EQ(bytes, sequence ? 8 * (4 * kWidth + kWidth * kWidth) : 0);

  GradientSynchronizer sync(synchronized, state, 1, 1);
  sync.bind();
  backward(synchronized, state, sequence);
  sync.wait();
  expect_gradients(synchronized, state, 1);

  backward(averaged, state, sequence);
  all_reduce_grads(averaged, state);
  expect_gradients(averaged, state, replicas);
}

TEST(PlainChildren, ThatTheirParentDescribesHaveTheGradientsOfOneProcess) {
  for (const auto children : {MixedNet::Children::stated, MixedNet::Children::by_parameter})
    for (const int64_t ranks : {2, 4})
      run_ranks(ranks, [&](const ParallelState& state) { check_fronts(state, true, children); },
                {.sizes = {.tensor = 2}});
}

TEST(PlainChildren, NeedNoDescriptionWhereAllRanksOfTpSeeAllTokens) {
  run_ranks(2,
            [](const ParallelState& state) {
              check_fronts(state, false, MixedNet::Children::undescribed);
            },
            {.sizes = {.tensor = 2}});
  run_ranks(2, [](const ParallelState& state) {  // one rank of tp has the whole sequence
    MixedNet net(context_of(state, true), MixedNet::Children::undescribed);
    all_reduce_grads(net, state);
    DistributedDataParallel(net, state);
  });
}

TEST(PlainChildren, OnesThatAreFrozenPass) {
  run_ranks(2,
            [](const ParallelState& state) {
              MixedNet net(context_of(state, true), MixedNet::Children::undescribed);
              for (const auto& item : net.named_parameters())
                item.value().requires_grad_(!item.key().starts_with("norm") &&
                                            !item.key().starts_with("mix"));
              const DistributedDataParallel ddp(net, state);
              EXPECT_EQ(ddp.buffers()[0]->params().size(), 4u);
            },
            {.sizes = {.tensor = 2}});
}

/// Describes a child that describes its own parameters.
class Nested : public DescribedModule {
 public:
  Nested(const ParallelContext& context, const ParamDescriptions& descriptions) {
    register_described_module(
        "inner", std::make_shared<MixedNet>(context.child("inner"), MixedNet::Children::stated),
        descriptions);
  }
};

class RegisteredTwice : public DescribedModule {
 public:
  RegisteredTwice() {
    register_described_module("norm", make_norm(), GradientState::partial_sum);
    EXPECT_THROW(register_described_module("norm", make_norm(), GradientState::complete),
                 c10::Error);
  }

 private:
  static torch::nn::LayerNorm make_norm() {
    return torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth}));
  }
};

TEST(PlainChildren, ANameThatIsTakenLeavesTheFirstDescription) {
  const RegisteredTwice net;
  const auto params = collect_parameters(net);
  ASSERT_EQ(params.size(), 2u);
  for (const NamedParameter& param : params)
    EXPECT_EQ(param.description.gradient_state(MeshAxis::tp), GradientState::partial_sum);
}

TEST(PlainChildren, TheInnermostDescriptionCountsAndOneOfNothingIsRefused) {
  const ParallelContext context = {.options = at::kDouble};
  ParamDescription tied;
  tied.tie = Tie{"norm", TiedStages::all};
  const Nested net(context, {{"norm.weight", tied}, {"inner.weight", tied}});
  for (const NamedParameter& param : collect_parameters(net))
    EXPECT_FALSE(param.description.tie.has_value()) << param.name;
  EXPECT_TRUE(throws_with<UsageError>(
      [&] {
        Nested(context, {{"norm.wieght", tied}});
      },
      "module 'inner': found a description of 'norm.wieght', "
      "allowed: of its parameters, norm.weight, norm.bias"));
  tied.placements[MeshAxis::dp] = Shard{0};
  EXPECT_TRUE(throws_with<UsageError>(
      [&] {
        Nested(context, {{"norm.weight", tied}});
      },
      "parameter 'inner.norm.weight': found Shard(0) over dp"));
}

}  // namespace
}  // namespace lockstep
