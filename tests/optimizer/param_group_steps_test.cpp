// Training with learning rates and weight decay by group, where the parameters of different groups
// are interleaved in the buffers.

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "lockstep/tests/support/distributed_training.h"

namespace lockstep {
namespace {

using testing::adamw_config;
using testing::expect_close;
using testing::kDecay;
using testing::kRate;
using testing::Rates;
using testing::run_ranks;
using testing::Setting;
using testing::train;
using testing::train_plainly;
using testing::Weights;

const std::vector<ParamOverride> kFourGroups = {
    {.applies_to = matches_name("weight1", "bias3"), .max_lr = 0.03},
    {.applies_to = matches_name("weight3", "bias?"), .wd_mult = 2},
    {.applies_to = matches_name("weight2"), .max_lr = 0.001, .wd_mult = 0}};

Rates rates_of_four(const std::string& name) {
  if (name == "weight1") return {0.03, kDecay};
  if (name == "bias3") return {0.03, 2 * kDecay};
  if (name == "weight2") return {0.001, 0};
  return {kRate, name == "weight0" || name == "weight4" ? kDecay : 2 * kDecay};
}

std::vector<Setting> settings_of(int64_t ranks) {
  return {{.ranks = ranks, .distributed = false, .bucket_size = 40},
          {.ranks = ranks, .microbatches = 2, .overlap_gather = true, .bucket_size = 40},
          {.ranks = ranks, .overlap_reduce = false}};
}

TEST(ParamGroupSteps, FollowLibtorchsOptimizersWithParamGroups) {
  std::vector<std::pair<OptimizerConfig, Weights>> cases;
  for (const OptimizerKind kind : {OptimizerKind::adam, OptimizerKind::sgd}) {
    OptimizerConfig config = adamw_config();
    config.optimizer = kind;
    cases.emplace_back(config, train_plainly(config, rates_of_four));
  }
  for (const int64_t ranks : {1, 2})
    run_ranks(ranks, [&](const ParallelState& state) {
      for (const Setting& setting : settings_of(ranks))
        for (const auto& [config, expected] : cases)
          for (const auto& [dtype, tolerance] :
               {std::pair{at::kDouble, 1e-12}, {at::kFloat, 1e-6}, {at::kBFloat16, 0.03}})
            expect_close(train(state, setting, config, dtype, {}, kFourGroups), expected, tolerance,
                         setting.text() + ", " + at::toString(dtype));
    });
}

TEST(ParamGroupSteps, SendWhatStepsWithoutOverridesSend) {
  for (const Setting& setting : settings_of(2)) {
    std::vector<CollectiveRecord> sent[2];
    for (const bool groups : {false, true}) {
      testing::CollectiveLog log;
      run_ranks(2,
                [&](const ParallelState& state) {
                  train(state, setting, adamw_config(), at::kDouble, {},
                        groups ? kFourGroups : std::vector<ParamOverride>());
                },
                {.log = &log});
      sent[groups] = log.of_rank(1);
    }
    EXPECT_GT(sent[0].size(), 40u);
    EXPECT_EQ(sent[0], sent[1]);
  }
}

TEST(ParamGroupSteps, RatesThatChangeTakeEffectInTheNextStep) {
  const OptimizerConfig config = adamw_config(/*clip=*/0);
  const auto moved_by = [&](double rate, double fast) {
    testing::SmallNet net;
    DistributedDataParallel ddp(net, ParallelState::single_process());
    Optimizer optimizer({&ddp}, config, {{.applies_to = matches_name("weight1"), .max_lr = 1}});
    optimizer.set_learning_rate(rate);
    optimizer.set_learning_rate(2, fast);  // weight1; group 1 has the biases
    const Weights before = testing::weights_of(net);
    net.loss(testing::SmallNet::samples(0, 4)).backward();
    finalize_model_grads({&ddp}, at::ones({}));
    optimizer.step();
    Weights moved = testing::weights_of(net);
    for (size_t i = 0; i < moved.size(); ++i) moved[i] -= before[i];
    return moved;
  };
  const Weights once = moved_by(0.01, 0.01), other = moved_by(0.02, 0.05);
  for (size_t i = 0; i < once.size(); ++i)
    EXPECT_TRUE(at::allclose(other[i], once[i] * (i == 2 ? 5 : 2), 1e-9, 1e-14)) << i;
}

}  // namespace
}  // namespace lockstep
