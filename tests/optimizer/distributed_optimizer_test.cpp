#include "lockstep/optimizer/distributed_optimizer.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/tests/support/distributed_training.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::adamw_config;
using testing::CollectiveLog;
using testing::expect_close;
using testing::kLayers;
using testing::kSamples;
using testing::kSteps;
using testing::reduce_gradients;
using testing::run_backwards;
using testing::run_ranks;
using testing::Setting;
using testing::SmallNet;
using testing::throws_with;
using testing::weights_of;

/// As after torch::load(), Module::to() and set_data().
TEST(DistributedOptimizer, AParameterThatLeftItsBufferIsNamedBeforeAnythingChanges) {
  const auto check = [](const ParallelState& state, const Setting& setting, bool pending) {
    SmallNet net(kLayers);
    DistributedDataParallel ddp(net, state, setting.ddp());
    const auto optimizer = make_optimizer({&ddp}, adamw_config());
    const auto step = [&] {
      ddp.zero_grad_buffer();
      run_backwards(net, ddp, 0, 1, at::kDouble);
      reduce_gradients(ddp);
      optimizer->step();
    };
    step();
    if (!pending) ddp.finish_param_sync();
    const at::Tensor loaded = at::full_like(net.parameters()[2], 0.25);
    net.parameters()[2].set_data(loaded);
    ddp.finish_param_sync();
    const at::Tensor before = ddp.buffers()[0]->param_data().clone();
    EXPECT_TRUE(throws_with<UsageError>(
        step, "parameter 'weight1' no longer lies in the buffer of its DistributedDataParallel"));
    EXPECT_TRUE(at::equal(ddp.buffers()[0]->param_data(), before)) << setting.text();
    EXPECT_TRUE(at::equal(net.parameters()[2], loaded)) << setting.text();
    EXPECT_EQ(optimizer->num_steps(), 1);
    EXPECT_TRUE(throws_with<UsageError>([&] { ddp.broadcast_params(); }, "'weight1' no longer"));
  };
  for (const bool distributed : {false, true})
    for (const bool overlap : {false, true}) {
      if (overlap && !distributed) continue;
      const Setting setting = {.ranks = 2, .distributed = distributed, .overlap_gather = overlap};
      for (const bool pending : {false, true})
        run_ranks(2, [&](const ParallelState& state) { check(state, setting, pending); });
    }
}

/// Adam hides a wrong scale of the gradients, so this test compares the gradients.
TEST(DistributedOptimizer, TheOwnedGradientsAreThoseOfOneProcess) {
  SmallNet reference(kLayers);
  (reference.loss(SmallNet::samples(0, kSamples)) / kSamples).backward();
  const auto expected = reference.parameters();
  const auto check = [&](const ParallelState& state, const Setting& setting, int mode) {
    SmallNet net(kLayers);
    DistributedDataParallelConfig config = setting.ddp();
    config.bucket_size = 60;
    config.calculate_per_token_loss = mode == 0;
    config.average_in_collective = mode == 2;
    DistributedDataParallel ddp(net, state, config);
    for (int step = 0; step < 2; ++step) {
      ddp.zero_grad_buffer();
      run_backwards(net, ddp, 0, setting.microbatches, at::kDouble);
      reduce_gradients(ddp);
    }
    const ParamAndGradBuffer& buffer = *ddp.buffers()[0];
    at::Tensor wanted = at::zeros_like(buffer.grad_data());
    for (size_t i = 0; i < expected.size(); ++i) {
      const auto& slot = buffer.layout().slots[i];
      wanted.slice(0, slot.start, slot.end).copy_(expected[i].grad().flatten());
    }
    // Here each rank's loss is a sum, not a mean.
    if (mode != 0) wanted *= static_cast<double>(kSamples / setting.ranks);
    EXPECT_EQ(buffer.owned_numel() * setting.ranks / setting.instances, buffer.layout().numel);
    for (const ElementRange& owned : buffer.owned())
      EXPECT_TRUE(at::allclose(buffer.grad_data().slice(0, owned.start, owned.end),
                               wanted.slice(0, owned.start, owned.end), 1e-12, 1e-15))
          << setting.text() << ", mode " << mode;
  };
  for (const int64_t ranks : {1, 2, 3, 4})
    for (const int64_t instances : {1, 2}) {
      if (ranks % instances != 0) continue;
      const Setting setting = {.ranks = ranks, .instances = instances, .microbatches = 2};
      run_ranks(
          ranks,
          [&](const ParallelState& state) {
            for (const int mode : {0, 1, 2}) check(state, setting, mode);
          },
          setting.threads());
    }
}

TEST(DistributedOptimizer, AStepOfOnesOwnOnTheShardIsGatheredByThePublicCalls) {
  // SGD, written out.
  SmallNet oracle(kLayers);
  for (int step = 0; step < kSteps; ++step) {
    oracle.zero_grad();
    (oracle.loss(SmallNet::samples(step * kSamples, kSamples)) / kSamples).backward();
    const at::NoGradGuard no_grad;
    for (at::Tensor& param : oracle.parameters()) param.sub_(param.grad() * 0.1);
  }
  for (const bool overlap : {false, true})
    run_ranks(3, [&](const ParallelState& state) {
      SmallNet net(kLayers);
      const Setting setting = {.overlap_gather = overlap, .bucket_size = 40};
      DistributedDataParallel ddp(net, state, setting.ddp());
      for (int step = 0; step < kSteps; ++step) {
        ddp.zero_grad_buffer();
        run_backwards(net, ddp, step, 2, at::kDouble);
        reduce_gradients(ddp);
        ddp.finish_param_sync();
        for (const auto& buffer : ddp.buffers())
          for (const ElementRange& r : buffer->owned())
            buffer->param_data()
                .slice(0, r.start, r.end)
                .sub_(buffer->grad_data().slice(0, r.start, r.end) * 0.1);
        ddp.note_params_changed();
        ddp.start_param_sync();
      }
      expect_close(weights_of(net), weights_of(oracle), 1e-12, "sgd");
    });
}

TEST(DistributedOptimizer, AStepSendsAReduceScatterAndAnAllGatherOfEveryBucket) {
  for (const int64_t instances : {1, 2}) {
    CollectiveLog log;
    Setting setting = {
        .ranks = 4, .instances = instances, .overlap_gather = true, .bucket_size = 60};
    testing::RankThreadOptions threads = setting.threads();
    threads.log = &log;
    run_ranks(
        4,
        [&](const ParallelState& state) {
          SmallNet net(kLayers, at::kBFloat16);
          DistributedDataParallel ddp(net, state, setting.ddp());
          DistributedOptimizer optimizer({&ddp}, adamw_config());
          const size_t before = log.of_rank(state.rank()).size();
          run_backwards(net, ddp, 0, 2, at::kBFloat16);
          reduce_gradients(ddp);
          optimizer.step();
          ddp.finish_param_sync();
          auto calls = log.of_rank(state.rank());
          calls.erase(calls.begin(), calls.begin() + static_cast<int64_t>(before));
          const auto buckets = ddp.buckets();
          ASSERT_GT(buckets.size(), 2u);
          std::vector<std::pair<std::string, int64_t>> expected;
          for (const auto& bucket : buckets)
            expected.push_back({"reduce_scatter (sum)", bucket.bytes});
          const int64_t shards = 4 / instances;
          if (instances > 1)
            for (const auto& bucket : buckets)
              expected.push_back({"all_reduce (sum)", bucket.bytes / shards});
          expected.push_back({"all_reduce (sum)", 8});  // tokens
          expected.push_back({"all_reduce (sum)", 8});  // norm
          for (auto bucket = buckets.rbegin(); bucket != buckets.rend(); ++bucket)
            expected.push_back({"all_gather", bucket->numel * 2 / shards});
          ASSERT_EQ(calls.size(), expected.size());
          for (size_t i = 0; i < calls.size(); ++i) {
            EXPECT_EQ(calls[i].operation, expected[i].first) << i;
            EXPECT_EQ(calls[i].bytes, expected[i].second) << i;
          }
        },
        threads);
  }
}

TEST(DistributedOptimizer, BytesOfARankAreTheFormulas) {
  for (const int64_t ranks : {1, 2, 3, 4})
    run_ranks(ranks, [&](const ParallelState& state) {
      SmallNet net(kLayers, at::kBFloat16);
      DistributedDataParallel ddp(net, state, Setting{}.ddp());
      const DistributedOptimizer optimizer({&ddp}, adamw_config());
      const ParamAndGradBuffer& buffer = *ddp.buffers()[0];
      const auto bytes = static_cast<int64_t>(buffer.param_data().nbytes()) +
                         static_cast<int64_t>(buffer.grad_data().nbytes()) +
                         optimizer.state_bytes();
      EXPECT_EQ(bytes, buffer.layout().numel * 6 + buffer.layout().numel * 12 / ranks);
    });
}

/// The weights after two steps with an optimizer of type Any.
template <class Any>
testing::Weights two_steps(const ParallelState& state, bool distributed) {
  SmallNet net(kLayers, at::kDouble);
  DistributedDataParallel ddp(net, state, Setting{.distributed = distributed}.ddp());
  Any optimizer({&ddp}, adamw_config());
  for (int step = 0; step < 2; ++step) {
    ddp.zero_grad_buffer();
    run_backwards(net, ddp, step, 1, at::kDouble);
    reduce_gradients(ddp);
    EXPECT_FALSE(optimizer.step().skipped);
  }
  ddp.finish_param_sync();
  const int64_t numel = ddp.buffers()[0]->layout().numel;
  EXPECT_EQ(optimizer.state_bytes(), 16 * (distributed ? numel / state.world_size() : numel));
  return weights_of(net);
}

TEST(DistributedOptimizer, IsAnOptimizerWhichTakesWholeAndShardedModels) {
  run_ranks(2, [&](const ParallelState& state) {
    const testing::Weights whole = two_steps<Optimizer>(state, false);
    expect_close(two_steps<Optimizer>(state, true), whole, 1e-12, "Optimizer, sharded");
    expect_close(two_steps<DistributedOptimizer>(state, true), whole, 1e-12, "sharded");
    expect_close(two_steps<DistributedOptimizer>(state, false), whole, 1e-12, "whole");
  });
}

TEST(DistributedOptimizer, ShardedModelsBesideWholeOnesAreRefused) {
  SmallNet plain, sharded;
  DistributedDataParallel a(plain, ParallelState::single_process());
  DistributedDataParallel b(sharded, ParallelState::single_process(), Setting{}.ddp());
  EXPECT_TRUE(throws_with<UsageError>(
      [&] {
        Optimizer({&b, &a}, {});
      },
      "Optimizer: model 1: found a model without "
      "ddp.use_distributed_optimizer, allowed: with it, as model 0"));
  EXPECT_TRUE(throws_with<UsageError>(
      [&] {
        make_optimizer({&a, &b}, {});
      },
      "found a model with ddp.use_distributed_optimizer, allowed: "
      "without it"));
}

}  // namespace
}  // namespace lockstep
