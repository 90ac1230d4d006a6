// What may come between backward, the reduction and the next step.

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/distributed/param_and_grad_buffer.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/tests/distributed/partly_used.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::errors_of_ranks;
using testing::PartlyUsed;
using testing::run_ranks;

TEST(DistributedDataParallel, RanksMayCommunicateBetweenBackwardAndReductionOfUnusedParameters) {
  run_ranks(2, [](const ParallelState& state) {
    PartlyUsed net;
    DistributedDataParallelConfig config;
    config.allow_unused_parameters = true;
    config.bucket_size = 1;
    DistributedDataParallel ddp(net, state, config);
    net.loss(state.rank() == 0).backward();
    const at::Tensor loss = at::full({2}, state.rank() + 1, at::kDouble);
    all_reduce(state.group(GroupKind::dp_cp), loss, ReduceOp::sum, "loss").wait();
    ddp.finish_grad_sync();
    EXPECT_TRUE(at::equal(loss, at::full({2}, 3, at::kDouble)));
    EXPECT_TRUE(at::equal(net.a.grad(), at::full({2}, 2, at::kDouble)));
    EXPECT_TRUE(at::equal(net.b.grad(), at::full({2}, 1, at::kDouble)));
  });
}

/// A net whose gradient on rank r is r + 1.
struct RankGradient : torch::nn::Module {
  RankGradient() { weight = register_parameter("weight", at::ones({4}, at::kDouble)); }
  void backward(const ParallelState& state) const {
    (weight * static_cast<double>(state.rank() + 1)).sum().backward();
  }
  at::Tensor weight;
};

TEST(DistributedDataParallel, ScalingBeforeTheReductionScalesTheTermsOfAllRanks) {
  run_ranks(2, [](const ParallelState& state) {
    RankGradient net;
    DistributedDataParallel ddp(net, state, {.use_distributed_optimizer = true});
    {
      const NoSyncGuard guard = ddp.no_sync();
      net.backward(state);
    }
    ddp.scale_gradients(0.5);
    ddp.start_grad_sync();
    ddp.finish_grad_sync();
    const ParamAndGradBuffer& buffer = *ddp.buffers().front();
    const at::Tensor held = buffer.held_grads(buffer.owned().front());
    for (int64_t i = 0; i < held.numel(); ++i) {
      const bool is_gap = buffer.owned().front().start + i >= net.weight.numel();
      EXPECT_EQ(held[i].item<double>(), is_gap ? 0 : 1.5) << i;
    }
  });
}

TEST(DistributedDataParallel, SharedOutGradientsAreScaledAfterTheReductionAndNotReplaced) {
  const auto errors = errors_of_ranks(2, [](const ParallelState& state) {
    RankGradient net;
    DistributedDataParallelConfig config;
    config.use_distributed_optimizer = true;
    config.data_parallel_sharding_strategy = ShardingStrategy::optim_grads;
    DistributedDataParallel ddp(net, state, config);
    {
      const NoSyncGuard guard = ddp.no_sync();
      net.backward(state);
    }
    EXPECT_TRUE(testing::throws_with<UsageError>([&] { ddp.scale_gradients(2); },
                                                 "scale_gradients: the state is accumulating"));
    net.weight.mutable_grad() = net.weight.grad().clamp(-1, 1);
    ddp.start_grad_sync();
  });
  for (const std::string& error : errors)
    EXPECT_NE(error.find("the gradient of 'weight' no longer lies in its buffer"),
              std::string::npos)
        << error;
}

TEST(DistributedDataParallel, AllReducesThatAreForcedAfterTheReductionBeginWithTheNextStep) {
  run_ranks(2, [](const ParallelState& state) {
    RankGradient net;
    DistributedDataParallel ddp(net, state, {.use_distributed_optimizer = true});
    const auto numel = [&] {
      int64_t sum = 0;
      for (const ElementRange& range : ddp.buffers().front()->reduced()) sum += range.numel();
      return sum;
    };
    net.backward(state);
    ddp.finish_grad_sync();
    const int64_t shard = numel();
    ddp.set_force_all_reduce(true);
    EXPECT_EQ(numel(), shard);
    ddp.zero_grad_buffer();
    EXPECT_EQ(numel(), 2 * shard);
    net.backward(state);
    ddp.finish_grad_sync();
    EXPECT_TRUE(at::equal(net.weight.grad(), at::full({4}, 3, at::kDouble)));
  });
}

}  // namespace
}  // namespace lockstep
