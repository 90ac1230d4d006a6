#include <gtest/gtest.h>

#include <cmath>

#include <ATen/ATen.h>

#include "own_net.h"

// What a checkpoint changes in a user's own model.

namespace lockstep::testing {
namespace {

using own_net::loss_of_net;
using own_net::make_net;
using own_net::Mistake;
using own_net::Net;

TEST(CheckpointCheck, ShardedParametersAreSavedAndLoaded) {
  CheckOptions options;
  options.optimizer = {};
  options.ddp.use_distributed_optimizer = true;
  const RankLayout one = {}, dp = {.ranks = 2};
  for (const ShardingStrategy strategy :
       {ShardingStrategy::optim_grads, ShardingStrategy::optim_grads_params}) {
    options.ddp.data_parallel_sharding_strategy = strategy;
    for (const auto& [from, to] : {std::pair(dp, dp), std::pair(one, dp), std::pair(dp, one)}) {
      const CheckpointReport report = check_checkpoint(make_net, loss_of_net, from, to, options);
      EXPECT_TRUE(report.ok()) << to_string(strategy) << ": " << to_string(report);
    }
  }
}

TEST(CheckpointCheck, RoundTripsAndReshardsKeepEveryBit) {
  CheckOptions options;
  options.optimizer = {};
  const RankLayout one = {}, tp = {.ranks = 2, .sizes = {.tensor = 2}},
                   all = {.ranks = 4, .sizes = {.tensor = 2, .pipeline = 2}};
  for (const auto& [from, to] : {std::pair(tp, tp), std::pair(one, all), std::pair(all, one)}) {
    const CheckpointReport report = check_checkpoint(make_net, loss_of_net, from, to, options);
    EXPECT_TRUE(report.ok()) << to_string(report);
    EXPECT_NEAR(report.next_loss, report.loaded_loss, 1e-10);
  }
}

TEST(CheckpointCheck, ALossThatIsAMeanIsThatOfTheGlobalBatchOnEveryLayout) {
  CheckOptions mean, average;
  mean.ddp.calculate_per_token_loss = false;
  average.ddp.average_in_collective = true;
  const auto make = [](const ParallelContext& context) {
    return std::make_shared<Net>(context, Mistake::mean_loss);
  };
  const auto loss = [](Net& net, const StageInput& input) {
    const at::Tensor output = net.forward(input);
    return output.dim() == 0 ? output / 2 : output;  // micro-batches
  };
  const RankLayout one = {}, dp = {.ranks = 2}, both = {.ranks = 4, .sizes = {.pipeline = 2}};
  for (const CheckOptions& options : {mean, average}) {
    const CheckpointReport alone = check_checkpoint(make, loss, one, one, options);
    EXPECT_TRUE(alone.ok()) << to_string(alone);
    for (const auto& [from, to] : {std::pair(dp, one), std::pair(one, dp), std::pair(both, one)}) {
      const CheckpointReport report = check_checkpoint(make, loss, from, to, options);
      EXPECT_TRUE(report.ok()) << to_string(report);
      EXPECT_NEAR(report.next_loss, alone.next_loss, 1e-9) << to_string(report);
    }
  }
}

/// Keeps a number that is not saved.
struct Counting : torch::nn::Module {
  explicit Counting(double of_step = 1) : share(of_step) {
    scale = register_parameter("scale", at::ones({3}, at::kDouble));
  }
  at::Tensor loss() { return (scale * (1 + share * static_cast<double>(++calls))).sum(); }
  double share;
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

/// Keeps a buffer that each rank fills with its number.
struct Numbering : torch::nn::Module {
  Numbering() {
    weight = register_parameter("weight", at::ones({3}, at::kDouble));
    number = register_buffer("number", at::full({2}, NAN, at::kDouble));
  }
  at::Tensor loss(const StageInput& input, double share) {
    number[1].fill_(share * static_cast<double>(input.context.state.rank()));
    return weight.square().sum();
  }
  at::Tensor weight, number;
};

TEST(CheckpointCheck, NamesWhatIsNotTheSameOnAllRanks) {
  for (const double share : {1.0, 0.0}) {
    const CheckpointReport report = check_checkpoint_round_trip(
        [](const ParallelContext&) { return std::make_shared<Numbering>(); },
        [share](Numbering& model, const StageInput& input) { return model.loss(input, share); },
        RankLayout{.ranks = 2});
    EXPECT_EQ(report.ok(), share == 0) << to_string(report);
    if (share == 0) continue;
    ASSERT_EQ(report.changed.size(), 1u) << to_string(report);
    EXPECT_EQ(report.changed[0].name, "number");
    EXPECT_EQ(report.changed[0].what,
              "where it was saved, ranks hold different values of 1 of 2 elements, the first at 1");
  }
}

TEST(CheckpointCheck, ComparesTheLossToTheTolerance) {
  CheckOptions options;
  for (const auto& [tolerance, ok] : {std::pair(1e-12, false), std::pair(1e-8, true)}) {
    options.tolerance = tolerance;
    const CheckpointReport report = check_checkpoint_round_trip(
        [](const ParallelContext&) { return std::make_shared<Counting>(1e-10); },
        [](Counting& model, const StageInput&) { return model.loss(); }, RankLayout{}, options);
    EXPECT_EQ(report.ok(), ok) << to_string(report);
  }
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
