#include "lockstep/optimizer/optimizer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include <ATen/ATen.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include "lockstep/core/error.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/optimizer/clip_grads.h"
#include "lockstep/optimizer/param_scheduler.h"
#include "lockstep/optimizer/step_control.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/small_net.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::run_ranks;
using testing::SmallNet;
using testing::throws_with;

/// A module with one parameter.
struct One : DescribedModule {
  explicit One(const at::Tensor& value, ParamDescription description = {}) {
    weight = register_described_parameter("weight", value, std::move(description));
  }
  at::Tensor weight;
};

/// A wrapped module whose gradient is `grad`.
struct Wrapped {
  Wrapped(const at::Tensor& value, const at::Tensor& grad,
          const ParallelState& state = ParallelState::single_process(),
          const ParamDescription& description = {})
      : module(value, description), ddp(module, state) {
    (module.weight * grad).sum().backward();
    finalize_model_grads({&ddp}, at::ones({}));
  }
  One module;
  DistributedDataParallel ddp;
};

TEST(ClipGradNorm, G102ScalesOnlyWhatIsTooLong) {
  Wrapped five(at::zeros({2}, at::kDouble), at::tensor({3.0, 4.0}, at::kDouble));
  EXPECT_DOUBLE_EQ(clip_grad_norm_({&five.ddp}, 1.0), 5.0);
  const at::Tensor clipped = at::tensor({3.0, 4.0}, at::kDouble) * .19999996;
  EXPECT_TRUE(at::allclose(five.module.weight.grad(), clipped, 1e-12));

  Wrapped half(at::zeros({2}, at::kDouble), at::tensor({0.3, 0.4}, at::kDouble));
  EXPECT_DOUBLE_EQ(clip_grad_norm_({&half.ddp}, 1.0), 0.5);
  EXPECT_DOUBLE_EQ(half.module.weight.grad()[0].item<double>(), 0.3);
}

TEST(ClipGradNorm, EqualsPyTorch) {
  SmallNet ours, theirs;
  DistributedDataParallel ddp(ours, ParallelState::single_process());
  ours.loss(SmallNet::samples(0, 4)).backward();
  theirs.loss(SmallNet::samples(0, 4)).backward();
  finalize_model_grads({&ddp}, at::ones({}));
  const double norm = clip_grad_norm_({&ddp}, 0.1);
  EXPECT_NEAR(norm, torch::nn::utils::clip_grad_norm_(theirs.parameters(), 0.1), 1e-12 * norm);
  for (size_t i = 0; i < ours.parameters().size(); ++i)
    EXPECT_TRUE(at::allclose(ours.parameters()[i].grad(), theirs.parameters()[i].grad(), 1e-12));
}

TEST(ClipGradNorm, RefusesAnUnfinishedStepAndANonsenseLimit) {
  One module(at::zeros({2}));
  DistributedDataParallel ddp(module, ParallelState::single_process());
  EXPECT_TRUE(throws_with<UsageError>([&] { clip_grad_norm_({&ddp}, 1); }, "not final"));
  EXPECT_TRUE(throws_with<UsageError>([&] { clip_grad_norm_({&ddp}, -1); }, "found -1"));
  EXPECT_TRUE(throws_with<UsageError>([] { grad_norm({}); }, "no model"));
}

TEST(GradNorm, ReplicatedParametersCountOnceAndShardsAll) {
  // tp = 2: a replicated parameter with norm 3, and shards with norms 4 and 12: 13 in total.
  testing::CollectiveLog log;
  run_ranks(
      2,
      [](const ParallelState& state) {
        ParamDescription shard;
        shard.placements[MeshAxis::tp] = Shard{0};
        Wrapped replicated(at::zeros({1}, at::kDouble), at::full({1}, 3.0, at::kDouble), state);
        Wrapped sharded(at::zeros({1}, at::kDouble),
                        at::full({1}, state.rank() == 0 ? 4.0 : 12.0, at::kDouble), state, shard);
        EXPECT_DOUBLE_EQ(grad_norm({&replicated.ddp, &sharded.ddp}).item<double>(), 13.0);
      },
      {.sizes = {.tensor = 2}, .log = &log});
  int64_t calls = 0;
  for (const auto& call : log.of_rank(0))
    if (call.operation == "all_reduce (sum)") {
      ++calls;
      EXPECT_EQ(call.bytes, 8);
    }
  EXPECT_EQ(calls, 1);
}

TEST(Optimizer, G104OneStep) {
  Wrapped one(at::ones({1, 1}, at::kDouble), at::full({1, 1}, 0.5, at::kDouble));
  OptimizerConfig config;
  config.lr = 0.1;
  Optimizer optimizer({&one.ddp}, config);
  EXPECT_DOUBLE_EQ(optimizer.step().grad_norm, 0.5);
  EXPECT_NEAR(one.module.weight.item<double>(), .899000002, 1e-12);
}

TEST(Optimizer, TwoRanksFollowPyTorchsOptimizer) {
  // The oracle is libtorch alone in one process, in double: mean gradient, clipping, AdamW with
  // weight decay on the matrices.
  SmallNet oracle;
  std::vector<at::Tensor> matrices, vectors;
  for (const at::Tensor& p : oracle.parameters()) (p.dim() > 1 ? matrices : vectors).push_back(p);
  const auto options = [](double decay) {
    return std::make_unique<torch::optim::AdamWOptions>(
        torch::optim::AdamWOptions(0.01).betas({0.9, 0.95}).weight_decay(decay));
  };
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(matrices, options(0.1));
  groups.emplace_back(vectors, options(0.0));
  torch::optim::AdamW theirs(groups, *options(0.1));
  for (int step = 0; step < 5; ++step) {
    theirs.zero_grad();
    (oracle.loss(SmallNet::samples(step * 4, 4)) / 4).backward();
    torch::nn::utils::clip_grad_norm_(oracle.parameters(), 0.2);
    theirs.step();
  }

  run_ranks(2, [&](const ParallelState& state) {
    SmallNet net;
    DistributedDataParallel ddp(net, state);
    OptimizerConfig config;
    config.lr = 0.01;
    config.adam_beta2 = 0.95;
    config.weight_decay = 0.1;
    config.clip_grad = 0.2;
    Optimizer optimizer({&ddp}, config);
    for (int step = 0; step < 5; ++step) {
      ddp.zero_grad_buffer();
      net.loss(SmallNet::samples(step * 4 + state.rank() * 2, 2)).backward();
      finalize_model_grads({&ddp}, at::full({}, 2));
      EXPECT_GT(optimizer.step().grad_norm, 0.2);
    }
    for (size_t i = 0; i < net.parameters().size(); ++i)
      EXPECT_TRUE(at::allclose(net.parameters()[i], oracle.parameters()[i], 1e-11, 1e-13)) << i;
  });
}

TEST(Optimizer, EachStepHasTheWeightDecayOfItsPlaceInTheSchedule) {
  constexpr int64_t kIterations = 5, kBatch = 4;
  OptimizerConfig config;
  config.lr = 0.1;
  config.clip_grad = 0;
  config.start_weight_decay = 0;
  config.end_weight_decay = 0.5;
  config.weight_decay_incr_style = WeightDecayIncrStyle::linear;
  SmallNet ours, theirs;
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const at::Tensor& param : theirs.parameters())
    groups.emplace_back(std::vector<at::Tensor>{param});
  torch::optim::AdamW plain(
      groups, torch::optim::AdamWOptions(0.1).betas({config.adam_beta1, config.adam_beta2}));
  DistributedDataParallel ddp(ours, ParallelState::single_process());
  Optimizer optimizer({&ddp}, config);
  const OptimizerParamScheduler scheduler(config, kIterations, kBatch);
  for (int64_t step = 0; step < kIterations; ++step) {
    const at::Tensor batch = SmallNet::samples(step * kBatch, kBatch);
    ddp.zero_grad_buffer();
    ours.loss(batch).backward();
    finalize_model_grads({&ddp}, at::full({}, kBatch));
    optimizer.apply_schedule(scheduler, step * kBatch);
    EXPECT_FALSE(optimizer.step().skipped);

    for (torch::optim::OptimizerParamGroup& group : plain.param_groups()) {
      auto& options = static_cast<torch::optim::AdamWOptions&>(group.options());
      options.lr(0.1 * (1 - static_cast<double>(step) / kIterations));
      const bool matrix = group.params()[0].dim() > 1;
      options.weight_decay(matrix ? 0.5 * static_cast<double>(step) / kIterations : 0);
    }
    plain.zero_grad();
    (theirs.loss(batch) / kBatch).backward();
    plain.step();
    for (size_t i = 0; i < ours.parameters().size(); ++i)
      EXPECT_TRUE(at::allclose(ours.parameters()[i], theirs.parameters()[i], 1e-11, 1e-13))
          << "parameter " << i << ", step " << step;
  }
}

TEST(Optimizer, MasterWeightsKeepWhatBf16WouldLose) {
  // 1000 steps of 1e-5 move a weight of 1 by 0.01; in bf16 alone it would stay 1.
  One module(at::ones({1, 1}, at::kBFloat16));
  DistributedDataParallel ddp(module, ParallelState::single_process());
  OptimizerConfig config;
  config.lr = 1e-5;
  config.weight_decay = 0;
  Optimizer optimizer({&ddp}, config);
  for (int step = 0; step < 1000; ++step) {
    ddp.zero_grad_buffer();
    module.weight.sum().backward();
    finalize_model_grads({&ddp}, at::ones({}));
    optimizer.step();
  }
  EXPECT_NEAR(optimizer.state_slices()[0].values[0].tensor.item<double>(), 0.99, 1e-4);
  EXPECT_EQ(module.weight.item<double>(), 0.98828125);
}

TEST(Optimizer, G101ANormAboveTheThresholdChangesNothing) {
  Wrapped one(at::ones({2, 1}, at::kDouble), at::full({2, 1}, 3.0, at::kDouble));
  OptimizerConfig config;
  config.grad_norm_skip_threshold = 4;
  Optimizer optimizer({&one.ddp}, config);
  EXPECT_TRUE(optimizer.step().skipped);
  EXPECT_EQ(optimizer.num_steps(), 0);
  config.grad_norm_skip_threshold = 5;
  EXPECT_FALSE(Optimizer({&one.ddp}, config).step().skipped);
}

TEST(Optimizer, ANormThatIsNotFiniteChangesNothing) {
  Wrapped broken(at::ones({2, 1}, at::kDouble),
                 at::full({2, 1}, std::numeric_limits<double>::infinity(), at::kDouble));
  Optimizer optimizer({&broken.ddp}, {});
  const auto result = optimizer.step();
  EXPECT_TRUE(result.skipped);
  EXPECT_FALSE(std::isfinite(result.grad_norm));
  EXPECT_EQ(optimizer.num_steps(), 0);
  EXPECT_TRUE(at::equal(broken.module.weight, at::ones({2, 1}, at::kDouble)));
}

TEST(Optimizer, AStepInvalidatesWhatForwardSaved) {
  Wrapped one(at::ones({2, 2}), at::ones({2, 2}));
  const at::Tensor stale = (one.module.weight * one.module.weight).sum();
  Optimizer({&one.ddp}, {}).step();
  EXPECT_TRUE(throws_with<c10::Error>([&] { stale.backward(); }, "modified by an inplace"));
}

/// On the CPU a step uses the first, on CUDA the second.
TEST(StepControl, IsTheSameFromANumberAndFromATensor) {
  constexpr double kScale = 8;
  for (const double clip : {0., 0.5, 2.})
    for (const std::optional<double> threshold : {std::optional<double>(), std::optional(3.)})
      for (const double norm :
           {0., 1e-3, 0.5, 1., 4., std::numeric_limits<double>::infinity(), std::nan("")}) {
        OptimizerConfig config;
        config.clip_grad = clip;
        config.grad_norm_skip_threshold = threshold;
        const auto by_number = step_control(norm, config, kScale);
        const auto by_tensor = step_control(at::full({}, norm, at::kDouble), config, kScale);
        const bool skips = !std::isfinite(norm) || (threshold && norm > *threshold);
        for (const at::Tensor& control : {by_number, by_tensor}) {
          EXPECT_EQ(control[1].item<double>(), skips ? 0 : 1) << norm;
          if (skips) continue;
          const double factor = clip > 0 && norm > clip ? clip / (norm + 1e-6) : 1;
          EXPECT_NEAR(control[0].item<double>(), factor / kScale, 3e-6 / kScale) << norm;
        }
      }
}

TEST(Optimizer, RefusesAWrongFieldAndAnUnfinishedStep) {
  One module(at::ones({2, 2}));
  DistributedDataParallel ddp(module, ParallelState::single_process());
  OptimizerConfig config;
  EXPECT_TRUE(
      throws_with<UsageError>([&] { Optimizer({&ddp}, config).step(); }, "finalize_model_grads()"));
  EXPECT_TRUE(throws_with<UsageError>(
      [&] {
        Optimizer({&ddp, &ddp}, config);
      },
      "Optimizer: model 1 is model 0 too"));
  config.adam_beta1 = 1;
  EXPECT_TRUE(throws_with<ConfigError>([&] { Optimizer({&ddp}, config); },
                                       "optimizer.adam_beta1: found 1"));
}

TEST(Optimizer, RefusesRatesThatAreNoNumbersAndKeepsTheOld) {
  One module(at::ones({2, 2}));
  DistributedDataParallel ddp(module, ParallelState::single_process());
  Optimizer optimizer({&ddp}, {});
  const double rate = optimizer.learning_rate(), decay = optimizer.weight_decay();
  for (const double value : {-1., std::nan(""), std::numeric_limits<double>::infinity()}) {
    EXPECT_TRUE(throws_with<UsageError>([&] { optimizer.set_learning_rate(value); },
                                        "Optimizer::set_learning_rate: found "));
    EXPECT_TRUE(throws_with<UsageError>([&] { optimizer.set_learning_rate(0, value); },
                                        "allowed: a finite number >= 0"));
    EXPECT_TRUE(throws_with<UsageError>([&] { optimizer.set_weight_decay(value); },
                                        "Optimizer::set_weight_decay: found "));
  }
  EXPECT_EQ(optimizer.learning_rate(), rate);
  EXPECT_EQ(optimizer.weight_decay(), decay);
}

}  // namespace
}  // namespace lockstep
