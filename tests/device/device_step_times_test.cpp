// On a device, the parts of an iteration's time are the device's own: late work counts where it was
// launched, although no host waits for it.

#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "lockstep/core/config_io.h"
#include "lockstep/tests/device/lagging_tests.h"
#include "lockstep/tests/support/device/device_ranks.h"
#include "lockstep/tests/support/synthetic_text.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/training/run_setup.h"
#include "lockstep/training/trainer.h"

namespace lockstep::testing {
namespace {

/// Longer than a busy machine delays a rank.
constexpr std::chrono::milliseconds kSlow(200);

class DeviceStepTimes : public ::testing::Test {
 protected:
  DeviceStepTimes() { path_ = folder_.write("text", synthetic_text()); }

  Config config(const std::vector<std::string>& more) const {
    std::vector<std::string> all = {"data.path=" + path_};
    all.insert(all.end(), more.begin(), more.end());
    return parse_config(
        "model { num_layers: 2 hidden_size: 16 num_attention_heads: 4 ffn_hidden_size: 32 "
        "seq_length: 16 vocab_size: 256 } "
        "train { global_batch_size: 4 micro_batch_size: 1 eval_iters: 1 train_iters: 6 "
        "log_interval: 3 } optimizer { lr: 0.01 lr_decay_style: \"constant\" }",
        "test", all);
  }

  /// The metrics of rank 0. The device of rank `slow` is late in each backward.
  static std::vector<IterationMetrics> run(const Config& config, int64_t world, int64_t slow) {
    std::vector<IterationMetrics> told;
    DeviceRankOptions options;
    options.sizes = parallel_options(config, c10::kCPU).sizes;
    run_device_ranks(
        world,
        [&](const ParallelState& state) {
          Trainer trainer(config, state);
          if (state.rank() == slow)
            trainer.training_model().chunks().front()->parameters().front().register_hook(
                [device = state.device()](const at::Tensor&) {
                  enqueue_bookkeeping(current_stream(device.index()),
                                      [] { std::this_thread::sleep_for(kSlow); });
                });
          TrainCallbacks callbacks;
          callbacks.iteration = [&](const IterationMetrics& metrics) {
            if (state.rank() == 0) told.push_back(metrics);
          };
          trainer.run(callbacks);
        },
        std::move(options));
    return told;
  }

  TemporaryFolder folder_;
  std::string path_;
};

TEST_F(DeviceStepTimes, WhatTheDeviceDoesLateCountsWhereItWasLaunched) {
  const auto told = run(config({"train.eval_interval=4", "train.micro_batch_size=4"}), 1, 0);
  ASSERT_EQ(told.size(), 6u);
  for (const IterationMetrics& metrics : told) {
    ASSERT_TRUE(metrics.times);
    for (const double ms : metrics.times->ms) EXPECT_GE(ms, 0);
    EXPECT_DOUBLE_EQ(metrics.times->total(), metrics.iteration_ms);
    EXPECT_GE((*metrics.times)[StepPart::backward], 200);
    EXPECT_EQ((*metrics.times)[StepPart::communication], 0);
    for (const StepPart part : {StepPart::forward, StepPart::optimizer})
      EXPECT_GT((*metrics.times)[part], 0) << name_of(part);
  }
}

TEST_F(DeviceStepTimes, PartsAddUpOnEveryLayout) {
  for (const auto& [name, layout] :
       {std::pair("dp", std::vector<std::string>{}),
        std::pair("tp", std::vector<std::string>{"parallel.tensor_model_parallel_size=2"}),
        std::pair("pp", std::vector<std::string>{"parallel.pipeline_model_parallel_size=2"})}) {
    SCOPED_TRACE(name);
    const auto told = run(config(layout), 2, -1);
    ASSERT_EQ(told.size(), 6u);
    for (const IterationMetrics& metrics : told) {
      EXPECT_DOUBLE_EQ(metrics.times->total(), metrics.iteration_ms);
      EXPECT_GT((*metrics.times)[StepPart::communication], 0);
      EXPECT_EQ(metrics.slowest_rank.has_value(), metrics.iteration % 3 == 0);
      if (metrics.slowest_rank) {
        EXPECT_EQ(metrics.slowest_rank->last_iteration, metrics.iteration - 1);
      }
    }
  }
}

TEST_F(DeviceStepTimes, ARankWhoseDeviceLagsIsNamed) {
  const auto told = run(config({"train.micro_batch_size=2"}), 2, 1);
  const SlowestRank& found = *told.at(5).slowest_rank;  // without iteration 1 and its set-up
  EXPECT_EQ(found.rank, 1);
  EXPECT_EQ(found.part, StepPart::backward);
  EXPECT_GE(found.times[StepPart::backward], 200);
  EXPECT_EQ(found.first_iteration, 3);
}

TEST_F(DeviceStepTimes, CostNoLaunchAndNoWaitOfTheHost) {
  const auto counts = [&](const char* setting) {
    use_lagging_device();
    reset_device_counts();
    run(config({setting, "train.eval_iters=0"}), 1, -1);
    return device_counts(0);
  };
  const DeviceCounts with = counts("train.log_step_times=true");
  const DeviceCounts without = counts("train.log_step_times=false");
  EXPECT_EQ(with.launches, without.launches);
  EXPECT_EQ(with.waits_by, without.waits_by);
}

TEST_F(DeviceStepTimes, RecordedIterationsAreTimedAsAWhole) {
  for (const char* setting : {"train.cuda_graph=step", "train.cuda_graph=microbatch"}) {
    const auto told = run(config({setting}), 1, -1);
    for (const IterationMetrics& metrics : told) {
      EXPECT_FALSE(metrics.times);
      EXPECT_GT(metrics.iteration_ms, 0);
    }
  }
}

}  // namespace
}  // namespace lockstep::testing
