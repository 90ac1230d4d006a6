#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lockstep/core/error.h"

#include "own_net.h"

// Gradients against finite differences, communication and checkpoints of a user's own model.

namespace lockstep::testing {
namespace {

using own_net::Mistake;
using own_net::Net;

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

auto make_net() {
  return
      [](const ParallelContext& context) { return std::make_shared<Net>(context, Mistake::none); };
}

auto loss_of_net() {
  return [](Net& net, const StageInput& input) { return net.forward(input); };
}

TEST(StepCommunication, CountsWhatAStepSends) {
  const RankLayout layout = {.ranks = 4, .sizes = {.tensor = 2}};
  const StepCommunication step = communication_of_step(make_net(), loss_of_net(), layout);
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

TEST(CheckpointCheck, RoundTripsAndReshardsKeepEveryBit) {
  CheckOptions options;
  options.optimizer = {};
  const RankLayout one = {}, tp = {.ranks = 2, .sizes = {.tensor = 2}},
                   all = {.ranks = 4, .sizes = {.tensor = 2, .pipeline = 2}};
  for (const auto& [from, to] : {std::pair(tp, tp), std::pair(one, all), std::pair(all, one)}) {
    const CheckpointReport report = check_checkpoint(make_net(), loss_of_net(), from, to, options);
    EXPECT_TRUE(report.ok()) << to_string(report);
    EXPECT_NEAR(report.next_loss, report.loaded_loss, 1e-10);
  }
}

/// Keeps a number that is not saved.
struct Counting : torch::nn::Module {
  Counting() { scale = register_parameter("scale", at::ones({3}, at::kDouble)); }
  at::Tensor loss() { return (scale * static_cast<double>(++calls)).sum(); }
  at::Tensor scale;
  int64_t calls = 0;
};

TEST(CheckpointCheck, ShowsWhatIsNotSaved) {
  const CheckpointReport report = check_checkpoint_round_trip(
      [](const ParallelContext&) { return std::make_shared<Counting>(); },
      [](Counting& model, const StageInput&) { return model.loss(); }, RankLayout{});
  EXPECT_FALSE(report.ok());
  EXPECT_TRUE(report.changed.empty());
  EXPECT_NE(to_string(report).find("keeps something else"), std::string::npos);
}

TEST(CheckpointCheck, NamesWhatALayoutCannotLoad) {
  const CheckpointReport report = check_checkpoint(
      [](const ParallelContext& context) {
        struct Model : DescribedModule {
          explicit Model(int64_t rows) {
            register_described_parameter("table", at::ones({rows, 2}, at::kDouble), {});
          }
        };
        return std::make_shared<Model>(context.state.world_size());
      },
      [](torch::nn::Module& model, const StageInput&) { return model.parameters()[0].sum(); },
      RankLayout{}, RankLayout{.ranks = 2});
  EXPECT_FALSE(report.ok());
  EXPECT_NE(report.error.find("table"), std::string::npos) << report.error;
}

}  // namespace
}  // namespace lockstep::testing
