#include <gtest/gtest.h>

#include "lockstep/core/error.h"
#include "lockstep/tests/support/described_params.h"
#include "lockstep/tests/support/distributed_training.h"

namespace lockstep {
namespace {

using testing::adamw_config;
using testing::DescribedParams;
using testing::kLayers;
using testing::kSamples;
using testing::kSteps;
using testing::reduce_gradients;
using testing::run_backwards;
using testing::run_ranks;
using testing::Setting;
using testing::SmallNet;

using Weights = std::vector<at::Tensor>;

Weights copies(const SmallNet& net) {
  Weights result;
  for (const at::Tensor& param : net.parameters())
    result.push_back(param.detach().to(at::kDouble, /*non_blocking=*/false, /*copy=*/true));
  return result;
}

void expect_close(const Weights& found, const Weights& expected, double tolerance) {
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_LE((found[i] - expected[i]).abs().max().item<double>(),
              tolerance * expected[i].abs().max().item<double>())
        << "parameter " << i;
}

TEST(LossScale, IsTakenOutAgain) {
  const Setting setting = {.ranks = 2, .bucket_size = 40};
  run_ranks(2, [&](const ParallelState& state) {
    Weights found[2];
    for (const bool scaled : {false, true}) {
      SmallNet net(kLayers);
      DistributedDataParallel ddp(net, state, setting.ddp());
      OptimizerConfig config = adamw_config();
      if (scaled) config.loss_scale = 1024;  // exact
      const auto optimizer = make_optimizer({&ddp}, config);
      EXPECT_EQ(optimizer->loss_scale(), scaled ? 1024 : 1);
      double norm = 0;
      for (int step = 0; step < 3; ++step) {
        ddp.zero_grad_buffer();
        (net.loss(SmallNet::samples(step * 8 + state.rank() * 4, 4)) * optimizer->loss_scale())
            .backward();
        finalize_model_grads({&ddp}, at::full({}, 4));
        norm = optimizer->step().grad_norm;
      }
      EXPECT_LT(norm, 10);
      ddp.finish_param_sync();
      found[scaled] = copies(net);
    }
    expect_close(found[1], found[0], 1e-14);
  });
}

TEST(LossScale, AnOverflowOnOneRankSkipsTheStepOnAllAndShrinksTheScale) {
  for (const bool distributed : {false, true})
    run_ranks(3, [&](const ParallelState& state) {
      SmallNet net(kLayers, at::kHalf);
      const Setting setting = {.distributed = distributed, .bucket_size = 40};
      DistributedDataParallel ddp(net, state, setting.ddp());
      OptimizerConfig config = adamw_config();
      config.initial_loss_scale = 1024;
      config.loss_scale_window = 2;
      config.hysteresis = 2;
      config.min_loss_scale = 400;
      const auto optimizer = make_optimizer({&ddp}, config);
      const auto step = [&](bool overflow) {
        ddp.zero_grad_buffer();
        const double factor = overflow && state.rank() == 1 ? 1e6 : optimizer->loss_scale();
        (net.loss(SmallNet::samples(state.rank() * 4, 4, at::kHalf)).to(at::kFloat) * factor)
            .backward();
        finalize_model_grads({&ddp}, at::full({}, 4));
        return optimizer->step().skipped;
      };
      const Weights before = copies(net);
      const bool overflows[] = {true, true, true, false, false, true, false, false};
      const double scales[] = {1024, 512, 400, 400, 800, 800, 800, 1600};
      for (size_t i = 0; i < 8; ++i) {
        EXPECT_EQ(step(overflows[i]), overflows[i]) << i;
        EXPECT_EQ(optimizer->loss_scale(), scales[i]) << i;
        if (i == 2) expect_close(copies(net), before, 0);
      }
      EXPECT_EQ(optimizer->num_steps(), 4);
    });
}

TEST(LossScale, AStepThatIsSkippedWithoutAnOverflowDoesNotShrinkIt) {
  run_ranks(2, [&](const ParallelState& state) {
    for (const bool by_limit : {false, true}) {
      SmallNet net(kLayers, at::kHalf);
      DistributedDataParallel ddp(net, state, Setting{.bucket_size = 40}.ddp());
      OptimizerConfig config = adamw_config();
      config.initial_loss_scale = 128;
      config.loss_scale_window = 100;
      config.hysteresis = 1;
      if (!by_limit) config.grad_norm_skip_threshold = 1e-3;
      const auto optimizer = make_optimizer({&ddp}, config);
      const Optimizer::StepLimits limits = {.grad_norm = 1e-3};
      const Weights before = copies(net);
      for (int step = 0; step < 3; ++step) {
        ddp.zero_grad_buffer();
        (net.loss(SmallNet::samples(state.rank() * 4, 4, at::kHalf)).to(at::kFloat) *
         optimizer->loss_scale())
            .backward();
        finalize_model_grads({&ddp}, at::full({}, 4));
        const Optimizer::StepResult result =
            by_limit ? optimizer->finish_step(
                           optimizer->start_step(limits).const_data_ptr<double>(), true)
                     : optimizer->step();
        EXPECT_TRUE(result.skipped);
        EXPECT_GT(result.grad_norm, 1e-3);
        EXPECT_LT(result.grad_norm, 100);
        EXPECT_EQ(optimizer->loss_scale(), 128) << "step " << step << ", by a limit " << by_limit;
      }
      EXPECT_EQ(optimizer->num_steps(), 0);
      expect_close(copies(net), before, 0);
    }
  });
}

TEST(LossScale, IsTheConfiguredOneAfterProgressIsRestored) {
  const auto restored = [](at::ScalarType dtype, const OptimizerConfig& config,
                           const OptimizerProgress& progress) {
    SmallNet net(kLayers, dtype);
    DistributedDataParallel ddp(net, ParallelState::single_process());
    Optimizer optimizer({&ddp}, config);
    optimizer.restore(progress);
    EXPECT_EQ(optimizer.num_steps(), progress.num_steps);
    return optimizer.loss_scale();
  };
  OptimizerConfig config = adamw_config();
  config.initial_loss_scale = 4096;
  const OptimizerProgress of_fp16{.num_steps = 5, .scaler = GradScalerState{.scale = 65536}};
  EXPECT_EQ(restored(at::kHalf, config, {.num_steps = 5}), 4096);
  EXPECT_EQ(restored(at::kHalf, config, of_fp16), 65536);
  EXPECT_EQ(restored(at::kBFloat16, config, of_fp16), 1);
  config.loss_scale = 1024;
  EXPECT_EQ(restored(at::kHalf, config, {.num_steps = 5}), 1024);
  EXPECT_EQ(restored(at::kHalf, config, of_fp16), 1024);
}

TEST(LossScale, Fp16FollowsDouble) {
  const Setting setting = {.ranks = 2, .overlap_gather = true, .bucket_size = 40};
  run_ranks(2, [&](const ParallelState& state) {
    OptimizerConfig config = adamw_config();
    SmallNet exact(kLayers);
    {
      DistributedDataParallel ddp(exact, state, setting.ddp());
      const auto optimizer = make_optimizer({&ddp}, config);
      for (int step = 0; step < kSteps; ++step) {
        ddp.zero_grad_buffer();
        run_backwards(exact, ddp, step, 1, at::kDouble);
        reduce_gradients(ddp);
        optimizer->step();
      }
      ddp.finish_param_sync();
    }
    SmallNet net(kLayers, at::kHalf);
    DistributedDataParallel ddp(net, state, setting.ddp());
    config.initial_loss_scale = 128;  // leaves room for sums in fp16
    const auto optimizer = make_optimizer({&ddp}, config);
    for (int step = 0; step < kSteps; ++step) {
      ddp.zero_grad_buffer();
      (net.loss(SmallNet::samples(step * kSamples + state.rank() * 60, 60, at::kHalf))
           .to(at::kFloat) *
       optimizer->loss_scale())
          .backward();
      reduce_gradients(ddp);
      EXPECT_FALSE(optimizer->step().skipped);
    }
    ddp.finish_param_sync();
    expect_close(copies(net), copies(exact), 0.01);
    EXPECT_EQ(optimizer->state_slices()[0].values[0].name, "master");
  });
}

TEST(NumZeros, AreCountedWhereTheConfigurationAsks) {
  DescribedParams module;
  module.add("weight", {5});
  DistributedDataParallel ddp(module, ParallelState::single_process());
  module.backward([](auto&&, auto&&) {
    return at::tensor({0.0, 1.0, 0.0, 2.0, 0.0}, at::kDouble);
  });
  finalize_model_grads({&ddp}, at::ones({}));
  OptimizerConfig config;
  EXPECT_FALSE(Optimizer({&ddp}, config).step().num_zeros.has_value());
  config.log_num_zeros_in_grad = true;
  EXPECT_EQ(Optimizer({&ddp}, config).step().num_zeros, 3);
}

TEST(Ties, AStageWithoutItsCopyIsFoundWhenTheOptimizerIsMade) {
  const auto errors =
      testing::errors_of_ranks(4,
                               [](const ParallelState& state) {
                                 const bool first = state.rank() < 2;
                                 ParamDescription tied;
                                 tied.tie = Tie{"word_embeddings", TiedStages::first_and_last};
                                 DescribedParams module;
                                 module.add("plain", {4});
                                 if (first) module.add("embedding", {4, 4}, tied);
                                 DistributedDataParallel ddp(module, state);
                                 Optimizer({&ddp}, {});
                               },
                               {.sizes = {.pipeline = 2}});
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("tied as 'word_embeddings' on the first and the last stage"),
              std::string::npos)
        << error;
    EXPECT_NE(error.find("(stage 1 of 2) holds no copy"), std::string::npos) << error;
  }
}

}  // namespace
}  // namespace lockstep
