#include <gtest/gtest.h>

#include <cmath>
#include <stdexcept>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lockstep/core/error.h"
#include "lockstep/tests/support/throws_with.h"

#include "own_net.h"

// Gradients against finite differences, and communication, of a user's own model.

namespace lockstep::testing {
namespace {

using own_net::loss_of_net;
using own_net::make_net;

struct Scaled : torch::autograd::Function<Scaled> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            double factor_of_backward) {
    context->saved_data["factor"] = factor_of_backward;
    return x * 3;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    return {grads[0] * context->saved_data["factor"].toDouble(), at::Tensor()};
  }
};

struct Weights : torch::nn::Module {
  Weights() {
    a = register_parameter("a", at::arange(5, at::kDouble) - 1.3);
    b = register_parameter("b", at::ones({2, 2}, at::kDouble));
  }
  at::Tensor a, b;
};

TEST(GradientCheck, FindsABackwardThatIsNotTheDerivative) {
  Weights weights;
  const auto loss_with = [&](double factor) {
    return [&weights, factor] {
      return Scaled::apply(at::tanh(weights.a), factor).sum() + weights.b.exp().sum();
    };
  };
  const GradientReport good = check_gradients(weights, loss_with(3));
  EXPECT_TRUE(good.ok()) << to_string(good);
  EXPECT_EQ(good.elements.size(), 9u);
  const GradientReport bad = check_gradients(weights, loss_with(2));
  EXPECT_FALSE(bad.ok());
  for (const CheckedElement& element : bad.elements) {
    EXPECT_EQ(element.agrees, element.parameter == "b");
    if (element.agrees) continue;
    EXPECT_NEAR(element.difference / element.autograd, 1.5, 1e-6);
  }
  EXPECT_NE(to_string(bad).find("`a`, element 0"), std::string::npos);
}

TEST(GradientCheck, NamesWhatTheLossDoesNotReach) {
  Weights weights;
  const GradientReport report = check_gradients(weights, [&] { return weights.a.sum(); });
  EXPECT_EQ(report.without_gradient, std::vector<std::string>{"b"});
  double calls = 0;
  EXPECT_THROW(check_gradients(weights, [&] { return weights.a.sum() * ++calls; }), UsageError);
}

TEST(GradientCheck, ALossThatThrowsLeavesTheWeightsAsTheyWere) {
  Weights weights;
  const at::Tensor before = weights.a.detach().clone();
  for (const int last : {3, 4}) {  // of the calls: two for the gradients, two for each element
    int calls = 0;
    const auto loss = [&] {
      if (++calls == last) throw std::runtime_error("out of luck");
      return weights.a.sum() + weights.b.sum();
    };
    EXPECT_THROW(check_gradients(weights, loss), std::runtime_error);
    EXPECT_TRUE(at::equal(weights.a, before)) << last;
  }
}

/// Causal attention whose loss does not depend on the bias of its keys: the bias adds the same
/// number to all scores of a query, and softmax removes it.
struct KeyBiasAttention : torch::nn::Module {
  explicit KeyBiasAttention(uint64_t seed) {
    constexpr int64_t kWidth = 32, kTokens = 64;
    const at::Generator generator = at::detail::createCPUGenerator(seed);
    const auto random = [&](at::IntArrayRef shape) {
      return at::randn(shape, generator, at::TensorOptions(at::kDouble));
    };
    input = random({kTokens, kWidth});
    query = register_parameter("query", random({kWidth, kWidth}) * 0.5);
    key = register_parameter("key", random({kWidth, kWidth}) * 0.5);
    value = register_parameter("value", random({kWidth, kWidth}) * 0.5);
    key_bias = register_parameter("key_bias", random({kWidth}) * 0.5);
    later = at::ones({kTokens, kTokens}, at::kBool).triu(1);
  }
  at::Tensor loss() const {
    const at::Tensor keys = at::linear(input, key, key_bias);
    const at::Tensor scores =
        at::matmul(at::linear(input, query), keys.t()) / std::sqrt(keys.size(1));
    const at::Tensor shares = at::softmax(scores.masked_fill(later, -INFINITY), -1);
    return at::matmul(shares, at::linear(input, value)).square().mean();
  }
  at::Tensor input, query, key, value, key_bias, later;
};

TEST(GradientCheck, AGradientThatIsZeroButForRoundingIsRight) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    KeyBiasAttention attention(seed);
    const GradientReport report = check_gradients(attention, [&] { return attention.loss(); });
    EXPECT_TRUE(report.ok()) << seed << ": " << to_string(report);
  }
}

TEST(GradientCheck, AGradientThatShouldBeZeroIsFound) {
  KeyBiasAttention attention(0);
  attention.key_bias.register_hook(
      [](const at::Tensor& grad) -> at::Tensor { return at::full_like(grad, 1e-3); });
  const GradientReport report = check_gradients(attention, [&] { return attention.loss(); });
  EXPECT_FALSE(report.ok());
  for (const CheckedElement& element : report.elements)
    EXPECT_EQ(element.agrees, element.parameter != "key_bias") << to_string(report);
}

TEST(RankThreads, WhateverARankThrowsIsItsError) {
  const auto errors = errors_of_ranks(3, [](const ParallelState& state) {
    if (state.rank() == 0) throw "text";
    if (state.rank() == 1) throw std::string("string");
    throw 7;
  });
  EXPECT_EQ(errors,
            (std::vector<std::string>{"text", "string", "an exception of an unknown type"}));
  EXPECT_THROW(run_ranks(1, [](const ParallelState&) { throw 7; }), int);
}

TEST(RankThreads, WhatAdjustThrowsIsTheRanksError) {
  RankThreadOptions options;
  options.adjust = [](int64_t rank, ParallelStateOptions&) {
    throw std::runtime_error("no options for rank " + std::to_string(rank));
  };
  int64_t bodies = 0;
  const auto body = [&](const ParallelState&) { ++bodies; };
  EXPECT_EQ(errors_of_ranks(2, body, options),
            (std::vector<std::string>{"no options for rank 0", "no options for rank 1"}));
  EXPECT_EQ(bodies, 0);
}

TEST(StepCommunication, CountsWhatAStepSends) {
  const RankLayout layout = {.ranks = 4, .sizes = {.tensor = 2}};
  const StepCommunication step = communication_of_step(make_net, loss_of_net, layout);
  constexpr int64_t kBytes = 8, kMicrobatches = 2;
  const int64_t hidden = own_net::kLength * own_net::kSamples / 2 * own_net::kWidth * kBytes;
  // Forward reduces the row-parallel product, backward the input gradient of the column-parallel
  // one.
  const int64_t sums = 2 * own_net::kBlocks * kMicrobatches;
  int64_t activations = 0;
  for (const CollectiveRecord& call : step.of_rank[0])
    if (call.group == "tp" && call.bytes == hidden) ++activations;
  EXPECT_EQ(activations, sums) << to_string(step, 0);
  int64_t numel = own_net::kTokens * own_net::kWidth;
  numel += own_net::kBlocks *
           (own_net::kWidth + own_net::kInner * own_net::kWidth + own_net::kInner +
            own_net::kWidth * own_net::kInner / 2 + own_net::kWidth + own_net::kWidth + 1);
  StepCommunication::Total gradients;
  for (const CollectiveRecord& call : step.of_rank[3])
    if (call.label.starts_with("bucket")) {
      ++gradients.calls;
      gradients.bytes += call.bytes;
      EXPECT_EQ(call.group, "dp-cp");
    }
  EXPECT_EQ(gradients, (StepCommunication::Total{1, numel * kBytes})) << to_string(step, 3);
  EXPECT_EQ(step.total(0, "all_reduce", "dp-cp").calls, 2);  // the bucket, the token count
}

/// A matrix whose rows tp cuts.
struct Matrix : DescribedModule {
  explicit Matrix(const ParallelContext& context) : tp(context.tensor_parallel()) {
    weight = add({"weight",
                  {6, 4},
                  NormalValues{0.5},
                  {.placements = {{MeshAxis::tp, Shard{0}}}, .update = ParamUpdate::matrix}},
                 context.origin());
  }
  at::Tensor loss(const StageInput& input) const {
    const ProcessGroup dp = input.context.state.group(GroupKind::dp);
    const at::Tensor samples = at::sin(at::arange(16, at::kDouble) + input.step).view({4, 4});
    const at::Tensor own = samples.chunk(dp.size())[static_cast<size_t>(dp.rank())];
    return reduce_from_group(at::tanh(at::linear(own, weight)).square().sum(), tp, "loss");
  }
  ProcessGroup tp;
  at::Tensor weight;
};

auto make_matrix() {
  return [](const ParallelContext& context) { return std::make_shared<Matrix>(context); };
}

auto loss_of_matrix() {
  return [](Matrix& matrix, const StageInput& input) { return matrix.loss(input); };
}

TEST(StepCommunication, CountsReductionsOfTheModelsLoss) {
  const StepCommunication step =
      communication_of_step(make_matrix(), loss_of_matrix(), {.ranks = 2, .sizes = {.tensor = 2}});
  EXPECT_EQ(step.total(0, "all_reduce", "tp"), (StepCommunication::Total{2, 16}))
      << to_string(step, 0);
}

TEST(StepCommunication, ShardedParametersAreGatheredAtTheirUse) {
  CheckOptions options;
  options.ddp.use_distributed_optimizer = true;
  options.ddp.data_parallel_sharding_strategy = ShardingStrategy::optim_grads_params;
  const StepCommunication step =
      communication_of_step(make_net, loss_of_net, {.ranks = 2}, options);
  // Forward and backward gather the blocks; gathered at once, each would be gathered once.
  EXPECT_GT(step.total(0, "all_gather", "dp-cp").calls, own_net::kBlocks + 1) << to_string(step, 0);
}

/// Needs the whole matrix.
struct UnitSteps : UpdateRule {
  explicit UnitSteps(UpdateUnit unit = UpdateUnit::matrix)
      : UpdateRule({.name = "unit_steps", .unit = unit}) {}
  void update(const UpdateRange& range) const override {
    const at::Tensor gradient = range.gradient();
    range.write_weights(range.weights - range.learning_rate * gradient / gradient.norm());
  }
};

TEST(MatrixRules, AreCheckedOnEveryLayout) {
  const RankLayout dp = {.ranks = 2}, tp = {.ranks = 2, .sizes = {.tensor = 2}};
  CheckOptions muon, own;
  muon.optimizer.optimizer = OptimizerKind::muon;
  own.rule = std::make_shared<UnitSteps>();
  for (CheckOptions options : {muon, own})
    for (const bool sharded : {false, true}) {
      options.ddp.use_distributed_optimizer = sharded;
      const LayoutReport report = check_layouts(make_matrix(), loss_of_matrix(), {dp, tp}, options);
      EXPECT_TRUE(report.ok()) << to_string(report);
      const CheckpointReport saved =
          check_checkpoint(make_matrix(), loss_of_matrix(), dp, tp, options);
      EXPECT_TRUE(saved.ok()) << to_string(saved);
    }
}

/// A matrix beside a frozen parameter that is not finite.
struct MaskedMatrix : Matrix {
  explicit MaskedMatrix(const ParallelContext& context) : Matrix(context) {
    register_parameter("mask", at::full({2}, -INFINITY, at::kDouble), /*requires_grad=*/false);
  }
};

TEST(MatrixRules, AFrozenInfinityDoesNotHideOtherWeights) {
  CheckOptions options;
  options.rule = std::make_shared<UnitSteps>(UpdateUnit::range);
  const LayoutReport report = check_layouts(
      [](const ParallelContext& context) { return std::make_shared<MaskedMatrix>(context); },
      loss_of_matrix(), {{.ranks = 2, .sizes = {.tensor = 2}}}, options);
  ASSERT_FALSE(report.ok());
  EXPECT_EQ(report.layouts.front().culprit->pass, "update") << to_string(report);
  EXPECT_EQ(report.layouts.front().culprit->parameter, "weight") << to_string(report);
}

TEST(RankLayouts, EveryCheckRefusesVirtualStages) {
  const RankLayout one = {}, chunks = {.ranks = 2, .sizes = {.pipeline = 2, .virtual_pipeline = 2}};
  const std::string found = "sizes.virtual_pipeline: found 2";
  EXPECT_TRUE(
      throws_with<ConfigError>([&] { check_layouts(make_net, loss_of_net, {chunks}); }, found));
  EXPECT_TRUE(throws_with<ConfigError>(
      [&] { communication_of_step(make_net, loss_of_net, chunks); }, found));
  for (const auto& [from, to] : {std::pair(one, chunks), std::pair(chunks, one)})
    EXPECT_TRUE(throws_with<ConfigError>(
        [&, &from = from, &to = to] { check_checkpoint(make_net, loss_of_net, from, to); }, found));
}

}  // namespace
}  // namespace lockstep::testing
