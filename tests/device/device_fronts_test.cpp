// The four gradient fronts, and checkpoints, on the asynchronous device over a backend with NCCL's
// rules: the bits match the CPU's.

#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/optim/sgd.h>

#include "lockstep/checkpoint/saved_model.h"
#include "lockstep/core/config_io.h"
#include "lockstep/datasets/token_batch.h"
#include "lockstep/distributed/all_reduce_grads.h"
#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/distributed/gradient_synchronizer.h"
#include "lockstep/distributed/reducer.h"
#include "lockstep/optimizer/clip_grad_norm.h"
#include "lockstep/optimizer/clip_grads.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/tests/support/device/device_ranks.h"
#include "lockstep/tests/support/small_net.h"
#include "lockstep/tests/support/synthetic_text.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/training/generate.h"
#include "lockstep/training/run_checkpoints.h"
#include "lockstep/training/run_setup.h"

namespace lockstep::testing {
namespace {

constexpr int64_t kFrontSteps = 4, kMicrobatches = 3, kFrontRanks = 3;
constexpr double kRate = 0.5, kClip = 0.3;

struct FrontNet : SmallNet {
  explicit FrontNet(c10::Device device) : SmallNet(3, at::kDouble, device) {}

  at::Tensor mean_loss(const ParallelState& state, int64_t step, int64_t microbatch) const {
    const int64_t number = (step * kMicrobatches + microbatch) * state.world_size() + state.rank();
    return loss(samples(number * 6, 6).to(state.device())) / 6;
  }
};

using FrontLoop = void (*)(const ParallelState&, FrontNet&);

void through_ddp(const ParallelState& state, FrontNet& net) {
  DistributedDataParallelConfig config;
  config.calculate_per_token_loss = false;
  config.overlap_grad_reduce = true;
  config.bucket_size = 20;
  DistributedDataParallel ddp(net, state, config);
  ddp.set_num_microbatches(kMicrobatches);
  torch::optim::SGD optimizer(net.parameters(), kRate);
  for (int64_t step = 0; step < kFrontSteps; ++step) {
    ddp.zero_grad();
    for (int64_t m = 0; m < kMicrobatches; ++m)
      (net.mean_loss(state, step, m) / kMicrobatches).backward();
    finalize_model_grads({&ddp});
    clip_grad_norm_({&ddp}, kClip);
    optimizer.step();
  }
}

void through_synchronizer(const ParallelState& state, FrontNet& net) {
  GradientSynchronizer sync(net, state, 1e-4, kMicrobatches,
                            {.reduction = GradientReduction::mean});
  sync.bind();
  torch::optim::SGD optimizer(net.parameters(), kRate);
  for (int64_t step = 0; step < kFrontSteps; ++step) {
    for (int64_t m = 0; m < kMicrobatches; ++m)
      (net.mean_loss(state, step, m) / kMicrobatches).backward();
    sync.wait();
    clip_grad_norm_(net, state, kClip);
    optimizer.step();
    sync.zero_grad();
  }
}

void through_all_reduce_grads(const ParallelState& state, FrontNet& net) {
  torch::optim::SGD optimizer(net.parameters(), kRate);
  for (int64_t step = 0; step < kFrontSteps; ++step) {
    optimizer.zero_grad();
    for (int64_t m = 0; m < kMicrobatches; ++m)
      (net.mean_loss(state, step, m) / kMicrobatches).backward();
    all_reduce_grads(net, state);
    clip_grad_norm_(net, kClip);
    optimizer.step();
  }
}

void through_reducer(const ParallelState& state, FrontNet& net) {
  Reducer reducer(net, state.group(GroupKind::dp_cp));
  torch::optim::SGD optimizer(net.parameters(), kRate);
  for (int64_t step = 0; step < kFrontSteps; ++step) {
    reducer.zero_grad();
    for (int64_t m = 0; m < kMicrobatches; ++m) {
      Reducer::NoSyncGuard no_sync;
      if (m + 1 < kMicrobatches) no_sync = reducer.no_sync();
      reducer.prepare_for_forward();
      const at::Tensor loss = net.mean_loss(state, step, m) / kMicrobatches;
      reducer.prepare_for_backward({loss});
      loss.backward();
    }
    clip_grad_norm_(net, kClip);
    optimizer.step();
  }
}

class DeviceFronts : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { use_lagging_device(); }

  /// The weights of all ranks, in rank order.
  static std::vector<at::Tensor> weights_after(FrontLoop loop, bool on_device, uint64_t seed = 0) {
    std::vector<std::vector<at::Tensor>> of_ranks(kFrontRanks);
    const auto body = [&](const ParallelState& state) {
      FrontNet net(state.device());
      loop(state, net);
      for (const at::Tensor& weight : net.parameters())
        of_ranks[static_cast<size_t>(state.rank())].push_back(weight.detach().cpu().clone());
    };
    if (on_device)
      run_device_ranks(kFrontRanks, body, {.device = {.seed = seed}});
    else
      run_ranks(kFrontRanks, body);
    std::vector<at::Tensor> all;
    for (const auto& weights : of_ranks) all.insert(all.end(), weights.begin(), weights.end());
    return all;
  }
};

TEST_F(DeviceFronts, AllHaveTheBitsOfTheCpu) {
  for (const FrontLoop loop :
       {through_ddp, through_synchronizer, through_all_reduce_grads, through_reducer}) {
    const auto expected = weights_after(loop, /*on_device=*/false);
    for (uint64_t seed = 1; seed <= 3; ++seed) {
      const auto found = weights_after(loop, /*on_device=*/true, seed);
      ASSERT_EQ(found.size(), expected.size());
      for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(at::equal(found[i], expected[i])) << i;
    }
  }
}

TEST_F(DeviceFronts, TokensThatTheHostCountedDivideGradientsOf16Bits) {
  const auto gradient_into = [](at::Tensor& result) {
    return [&result](const ParallelState& state) {
      SmallNet net(2, at::kBFloat16, state.device());
      GradientSynchronizer sync(net, state, 1e-4, 1,
                                {.reduction = GradientReduction::per_token,
                                 .token_group = state.group(GroupKind::dp_cp)});
      sync.bind();
      const at::Tensor samples = SmallNet::samples(4 * state.rank(), 4, at::kBFloat16);
      net.loss(samples.to(state.device())).backward();
      sync.wait(at::full({}, 4, at::kLong));
      const at::Tensor gradient = net.parameters()[0].grad();
      EXPECT_EQ(gradient.scalar_type(), at::kBFloat16);
      if (state.rank() == 0) result = gradient.cpu().clone();
    };
  };
  at::Tensor expected, found;
  run_ranks(2, gradient_into(expected));
  run_device_ranks(2, gradient_into(found));
  EXPECT_TRUE(at::equal(found, expected));
}

TEST_F(DeviceFronts, GradientsOnSeveralDevicesAreDividedByTheirTokens) {
  const ParallelState state = ParallelState::single_process(lagging_device(0));
  const at::Tensor there = at::ones({3}, state.device()).requires_grad_(true);
  const at::Tensor here = at::ones({3}).requires_grad_(true);
  GradientSynchronizer sync(
      {{there, here}}, 1, 1,
      {.reduction = GradientReduction::per_token, .token_group = state.world()});
  sync.bind();
  for (const at::Tensor& param : {there, here}) (param * 6).sum().backward();
  sync.wait(at::full({}, 4, state.device()));
  for (const at::Tensor& param : {there, here})
    EXPECT_TRUE(at::equal(param.grad().cpu(), at::full({3}, 1.5f)));
}

TEST_F(DeviceFronts, AParameterOnAnotherDeviceThanTheJobsIsNamed) {
  const auto errors = errors_of_ranks(2, [](const ParallelState& state) {
    const SmallNet net(1, at::kDouble, state.rank() == 1 ? lagging_device(0) : c10::kCPU);
    DistributedDataParallel(net, state);
  });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("parameter 'weight0' is on"), std::string::npos) << error;
    EXPECT_NE(error.find("allowed: cpu, the device of the job"), std::string::npos) << error;
  }
}

TEST_F(DeviceFronts, RanksOfAReducerWithParametersOnDifferentDevicesAllThrow) {
  const auto errors = errors_of_ranks(2, [](const ParallelState& state) {
    const SmallNet net(1, at::kDouble, state.rank() == 1 ? lagging_device(0) : c10::kCPU);
    Reducer(net, state);
  });
  for (const std::string& error : errors)
    EXPECT_NE(error.find("parameter 'weight0' is [4, 3] Double, trained"), std::string::npos)
        << error;
}

TEST_F(DeviceFronts, SeveralTensorsOfACallAreOneLaunchThatIsWaitedFor) {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    DeviceRankOptions options;
    options.rules = std::make_shared<NcclRules>();
    options.device = {.seed = seed, .longest_delay = std::chrono::milliseconds(20), .delayed = 1};
    run_device_ranks(
        2,
        [](const ParallelState& state) {
          const std::vector<at::Tensor> x = {at::ones({100}, state.device()),
                                             at::full({50}, 2.0f, state.device())};
          all_reduce(state.group(GroupKind::dp), x, ReduceOp::sum, "pair").wait();
          EXPECT_EQ(x[0].sum().item<double>(), 200);
          EXPECT_EQ(x[1].sum().item<double>(), 200);
        },
        options);
    for (const int64_t rank : {0, 1}) EXPECT_EQ(options.rules->counts(rank).kernels, 1);
  }
}

/// The weights and optimizer state of a checkpoint, by file.
std::map<std::string, std::string> shards_in(const std::filesystem::path& folder) {
  std::map<std::string, std::string> contents;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (entry.path().extension() != ".safetensors") continue;
    std::ostringstream text;
    text << std::ifstream(entry.path(), std::ios::binary).rdbuf();
    contents[std::filesystem::relative(entry.path(), folder)] = text.str();
  }
  return contents;
}

class DeviceCheckpoints : public DeviceFronts {
 protected:
  DeviceCheckpoints() { path_ = folder_.write("text", synthetic_text()); }

  Config config(int64_t iterations, bool async) const {
    return parse_config(
        "model { num_layers: 2 hidden_size: 16 num_attention_heads: 4 seq_length: 16 } "
        "train { global_batch_size: 4 micro_batch_size: 1 eval_iters: 0 } "
        "ddp { use_distributed_optimizer: true overlap_grad_reduce: true bucket_size: 1000 "
        "overlap_param_gather: true } "
        "checkpoint { save_interval: 2 load_if_present: true } "
        "optimizer { lr: 0.01 lr_decay_style: \"constant\" }",
        "test",
        {"data.path=" + path_, "train.train_iters=" + std::to_string(iterations),
         "train.precision=bf16",
         std::string("checkpoint.async_save=") + (async ? "true" : "false")});
  }

  /// Resumes from `folder` and trains to `iterations`. Returns the losses of rank 0.
  static std::vector<double> train_in(const std::string& folder, const Config& config,
                                      bool on_device, uint64_t seed = 1) {
    std::vector<double> losses;
    Config with_load = config;
    with_load.checkpoint.load = folder;
    const auto body = [&](const ParallelState& state) {
      RunCheckpoints checkpoints(with_load.checkpoint, folder, state);
      Trainer trainer(with_load, state);
      checkpoints.load(trainer);
      TrainCallbacks callbacks;
      callbacks.checkpoint = [&](bool last) { checkpoints.after_iteration(trainer, last); };
      if (state.rank() == 0)
        callbacks.iteration = [&](const IterationMetrics& m) { losses.push_back(m.lm_loss); };
      trainer.run(callbacks);
      checkpoints.finish();
    };
    if (on_device)
      run_device_ranks(2, body, {.device = {.seed = seed}});
    else
      run_ranks(2, body);
    return losses;
  }

  TemporaryFolder folder_;
  std::string path_;
};

TEST_F(DeviceCheckpoints, HaveTheBytesOfTheCpusAndResumeThere) {
  for (const bool async : {false, true}) {
    const TemporaryFolder cpu, device;
    const auto expected = train_in(cpu.path(), config(6, async), /*on_device=*/false);
    auto found = train_in(device.path(), config(4, async), /*on_device=*/true, 1);
    const auto rest = train_in(device.path(), config(6, async), /*on_device=*/true, 2);
    EXPECT_EQ(rest.size(), 2U);
    found.insert(found.end(), rest.begin(), rest.end());
    EXPECT_EQ(found, expected);
    const auto shards = shards_in(cpu.path());
    EXPECT_GT(shards.size(), 2U);
    EXPECT_TRUE(shards_in(device.path()) == shards) << (async ? "async" : "at once");
  }
}

TEST_F(DeviceCheckpoints, AreStagedWithoutAWait) {
  const TemporaryFolder saved;
  const Config job = config(4, /*async=*/true);
  run_device_ranks(2, [&](const ParallelState& state) {
    RunCheckpoints checkpoints(job.checkpoint, saved.path(), state);
    Trainer trainer(job, state);
    TrainCallbacks callbacks;
    callbacks.checkpoint = [&](bool last) {
      const DeviceCounts before = device_counts(state.device().index());
      checkpoints.after_iteration(trainer, last);
      const DeviceCounts added = device_counts(state.device().index()) - before;
      // The writer thread waits for the event of the copies, at most once in this time.
      for (const auto& [cause, times] : added.waits_by)
        EXPECT_TRUE(cause == "synchronize event" && times == 1) << times << " " << cause;
    };
    trainer.run(callbacks);
    checkpoints.finish();
  });
}

TEST_F(DeviceCheckpoints, AModelThatIsLoadedOnADeviceWritesTheSameText) {
  const TemporaryFolder saved;
  train_in(saved.path(), config(4, false), /*on_device=*/true);
  const GenerateOptions options{.max_tokens = 20, .seed = 3};
  const auto text_on = [&](c10::Device device) {
    return generate(*load_model(saved.path(), device).model, {'T', 'h', 'e'}, options);
  };
  EXPECT_EQ(text_on(lagging_device(1)), text_on(c10::kCPU));
}

TEST_F(DeviceCheckpoints, AModelThatIsLoadedOnADeviceHasTheSameLoss) {
  const TemporaryFolder saved;
  train_in(saved.path(), config(4, false), /*on_device=*/true);
  const auto loss_on = [&](c10::Device device) {
    const at::NoGradGuard no_grad;
    const SavedModel loaded = load_model(saved.path(), device);
    const int64_t length = loaded.config.model.seq_length;
    const std::string text = synthetic_text().substr(0, static_cast<size_t>(3 * (length + 1)));
    const TokenBatch batch =
        make_token_batch(std::vector<int64_t>(text.begin(), text.end()), length, device);
    return loaded.model->forward(batch.tokens, batch.labels).sum(at::kDouble).item<double>();
  };
  EXPECT_EQ(loss_on(lagging_device(1)), loss_on(c10::kCPU));
}

// A lone rank sends nothing, so its state need not know the device.
TEST_F(DeviceFronts, ALoneRankTakesModelsOnAnyDevice) {
  const ParallelState state = ParallelState::single_process();
  SmallNet wrapped(1, at::kDouble, lagging_device(0)), reduced(1, at::kDouble, lagging_device(0));
  EXPECT_NO_THROW(DistributedDataParallel(wrapped, state));
  EXPECT_NO_THROW(Reducer(reduced, state.world()));
}

}  // namespace
}  // namespace lockstep::testing
