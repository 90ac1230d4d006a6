// Functions on all gradients of a module, called with a module that a front has wrapped.

#include <gtest/gtest.h>

#include <functional>

#include <ATen/ATen.h>
#include <torch/nn/utils/clip_grad.h>

#include "lockstep/core/error.h"
#include "lockstep/distributed/all_reduce_grads.h"
#include "lockstep/distributed/gradient_synchronizer.h"
#include "lockstep/distributed/reducer.h"
#include "lockstep/optimizer/clip_grad_norm.h"
#include "lockstep/optimizer/clip_grads.h"
#include "lockstep/tests/support/distributed_training.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::kSamples;
using testing::reduce_gradients;
using testing::run_backwards;
using testing::run_ranks;
using testing::Setting;
using testing::SmallNet;
using testing::throws_with;

constexpr int64_t kRanks = 2;

double norm_of_one_process() {
  const SmallNet net;
  (net.loss(SmallNet::samples(0, kSamples)) / kSamples).backward();
  return torch::nn::utils::clip_grad_norm_(net.parameters(), 1e9);
}

/// The gradients that `body` leaves are refused, for a module and for the list of its parameters.
/// Ranks cannot use their groups after a refusal.
void expect_clip_refused(const std::function<void(const ParallelState&, SmallNet&,
                                                  const std::function<void()>& check)>& body,
                         const std::string& why) {
  for (const bool as_list : {false, true})
    run_ranks(kRanks, [&](const ParallelState& state) {
      SmallNet net;
      body(state, net, [&] {
        EXPECT_TRUE(throws_with<UsageError>(
            [&] {
              if (as_list)
                clip_grad_norm_(net, 1);
              else
                clip_grad_norm_(net, state, 1);
            },
            "clip_grad_norm_: the gradient of 'weight0' " + why));
      });
    });
}

TEST(WrappedModules, OnesWithShardedGradientsAreClippedByTheFormForWrappedModels) {
  for (const auto strategy : {ShardingStrategy::optim, ShardingStrategy::optim_grads,
                              ShardingStrategy::optim_grads_params})
    expect_clip_refused(
        [strategy](const ParallelState& state, SmallNet& net, const auto& check) {
          DistributedDataParallelConfig config = Setting{.distributed = true}.ddp();
          config.data_parallel_sharding_strategy = strategy;
          DistributedDataParallel ddp(net, state, config);
          run_backwards(net, ddp, 0, 1, at::kDouble);
          reduce_gradients(ddp);
          EXPECT_NEAR(clip_grad_norm_({&ddp}, 1e9), norm_of_one_process(), 1e-12);
          check();
        },
        "is sharded by DistributedDataParallel (ddp.use_distributed_optimizer), so that no rank "
        "has all of it; call clip_grad_norm_({&ddp}, ...)");
}

TEST(WrappedModules, OnesWithWholeGradientsAreClippedByEitherForm) {
  run_ranks(kRanks, [](const ParallelState& state) {
    SmallNet net;
    DistributedDataParallelConfig config = Setting{.distributed = true}.ddp();
    for (const bool distributed : {false, true}) {
      config.use_distributed_optimizer = distributed;
      DistributedDataParallel ddp(net, state, config);
      if (distributed) ddp.set_force_all_reduce(true);
      run_backwards(net, ddp, 0, 1, at::kDouble);
      reduce_gradients(ddp);
      const double expected = norm_of_one_process();
      EXPECT_NEAR(clip_grad_norm_(net, state, std::nullopt).item<double>(), expected, 1e-12);
      EXPECT_NEAR(clip_grad_norm_({&ddp}, 1e9), expected, 1e-12);
    }
  });
}

TEST(WrappedModules, GradientsThatAreStillReducedOrAccumulatedAreNotClipped) {
  for (const bool overlap : {true, false})
    expect_clip_refused(
        [&](const ParallelState& state, SmallNet& net, const auto& check) {
          const Setting setting = {
              .distributed = false, .overlap_reduce = overlap, .bucket_size = 20};
          DistributedDataParallel ddp(net, state, setting.ddp());
          run_backwards(net, ddp, 0, 1, at::kDouble);
          check();
        },
        overlap ? "is not reduced yet (DistributedDataParallel is in state reducing); call "
                  "finish_grad_sync() or finalize_model_grads() first"
                : "is not reduced yet (DistributedDataParallel is in state accumulating");
}

TEST(WrappedModules, GradientsThatAreReducedButNotFinalizedAreNotClipped) {
  const Setting setting = {.distributed = false};
  expect_clip_refused(
      [&](const ParallelState& state, SmallNet& net, const auto& check) {
        DistributedDataParallel ddp(net, state, setting.ddp());
        run_backwards(net, ddp, 0, 1, at::kDouble);
        reduce_gradients(ddp);
        ddp.zero_grad_buffer();
        run_backwards(net, ddp, 0, 1, at::kDouble);
        ddp.finish_grad_sync();
        check();
      },
      "is not final (DistributedDataParallel is in state ready, not divided by the tokens); call "
      "finalize_model_grads() first");
  run_ranks(kRanks, [&](const ParallelState& state) {
    SmallNet net;
    DistributedDataParallel ddp(net, state, setting.ddp());
    run_backwards(net, ddp, 0, 1, at::kDouble);
    ddp.finish_grad_sync();
    const MeshParameters tensors(net.parameters());  // plain tensors, without a front
    EXPECT_NEAR(clip_grad_norm_(tensors, std::nullopt).item<double>(),
                kSamples * norm_of_one_process(), 1e-10);
    reduce_gradients(ddp);
    EXPECT_NEAR(clip_grad_norm_(net, state, std::nullopt).item<double>(), norm_of_one_process(),
                1e-12);
  });
}

TEST(WrappedModules, OfAGradientSynchronizerAreClippedAfterWait) {
  const auto backward = [](const ParallelState& state, const SmallNet& net) {
    const int64_t share = kSamples / kRanks;
    (net.loss(SmallNet::samples(state.rank() * share, share)) / kSamples).backward();
  };
  expect_clip_refused(
      [&](const ParallelState& state, SmallNet& net, const auto& check) {
        GradientSynchronizer sync(net, state, 1, 1);
        sync.bind();
        backward(state, net);
        check();
      },
      "is not reduced yet (GradientSynchronizer is in state reducing); call wait() first");
  run_ranks(kRanks, [&](const ParallelState& state) {
    SmallNet net;
    GradientSynchronizer sync(net, state, 1, 1);
    sync.bind();
    backward(state, net);
    sync.wait();
    EXPECT_NEAR(clip_grad_norm_(net, state, std::nullopt).item<double>(), norm_of_one_process(),
                1e-12);
  });
}

TEST(WrappedModules, ASecondFrontIsRefusedByName) {
  const char* const taken =
      "parameter 'weight0' has a post-accumulate-gradient hook already, of a "
      "DistributedDataParallel; allowed: none, because a parameter belongs to one gradient API";
  using Front = std::function<void(const SmallNet&, const ParallelState&)>;
  const std::pair<Front, const char*> fronts[] = {
      {[](auto& net, auto& state) { all_reduce_grads(net, state); },
       "all_reduce_grads: the gradient of 'weight0' is reduced by a DistributedDataParallel, "
       "allowed: parameters of no other gradient API"},
      {[](auto& net, auto& state) { GradientSynchronizer(net, state, 1, 1).bind(); }, taken},
      {[](auto& net, auto& state) { DistributedDataParallel(net, state); }, taken},
      {[](auto& net, auto& state) { Reducer(net, state); }, taken}};
  for (const auto& [front, message] : fronts)
    run_ranks(kRanks, [&, &call = front, &text = message](const ParallelState& state) {
      SmallNet net;
      DistributedDataParallel ddp(net, state);
      run_backwards(net, ddp, 0, 1, at::kDouble);
      reduce_gradients(ddp);
      EXPECT_TRUE(throws_with<UsageError>([&] { call(net, state); }, text));
    });
}

}  // namespace
}  // namespace lockstep
