// What may come between backward, the reduction and the next step.

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/distributed/grad_sync_state.h"
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
using testing::throws_with;

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
    const auto reported = [&] {
      return to_string(finalize_model_grads({&ddp}, at::ones({})).entries.front().operation);
    };
    net.backward(state);
    ddp.finish_grad_sync();
    const int64_t shard = numel();
    ddp.set_force_all_reduce(true);
    EXPECT_EQ(numel(), shard);
    EXPECT_EQ(reported(), "reduce-scatter sum");
    ddp.zero_grad_buffer();
    EXPECT_EQ(numel(), 2 * shard);
    net.backward(state);
    ddp.finish_grad_sync();
    EXPECT_TRUE(at::equal(net.weight.grad(), at::full({4}, 3, at::kDouble)));
    EXPECT_EQ(reported(), "all-reduce sum");
  });
}

/// Two parameters in two buckets, which nothing launches before finish().
GradSyncState without_overlap(bool allow_unused) {
  return {{{"a", 0}, {"b", 1}}, 2, /*overlap=*/false, allow_unused};
}

/// A backward that counts and yields a gradient of parameters [0, count).
void note_backward(GradSyncState& state, int64_t pass, int64_t count) {
  for (int64_t param = 0; param < count; ++param) {
    (void)state.on_gradient(param, /*synchronize=*/true);
    state.note_pass(pass);
  }
}

constexpr const char* kFinishFirst =
    "zero_grad_buffer: the state is accumulating 1; call finish_grad_sync() first, or "
    "abandon_step() after an exception";

TEST(GradSyncState, AStepThatNobodyReducedIsNotForgotten) {
  for (const bool allow_unused : {false, true}) {
    GradSyncState state = without_overlap(allow_unused);
    note_backward(state, 7, allow_unused ? 1 : 2);
    EXPECT_TRUE(throws_with<UsageError>([&] { state.reset(); }, kFinishFirst));
    EXPECT_EQ(state.phase_text(), "accumulating 1");
    EXPECT_EQ(state.finish().last, 2);
    state.finished();
    EXPECT_NO_THROW(state.reset());
    note_backward(state, 8, 1);
    (void)state.abandon();
    EXPECT_NO_THROW(state.reset());
  }
}

TEST(GradSyncState, AStepThatIsNotCompleteMayBeForgotten) {
  for (const bool allow_unused : {false, true}) {
    GradSyncState state = without_overlap(allow_unused);
    EXPECT_NO_THROW(state.reset());
    for (const int64_t param : {0, 1}) (void)state.on_gradient(param, /*synchronize=*/false);
    EXPECT_NO_THROW(state.reset());  // all of it came inside no_sync()
    state.set_microbatches(2);
    note_backward(state, 7, 2);
    EXPECT_NO_THROW(state.reset());  // one backward of two
    EXPECT_EQ(state.phase_text(), "idle");
  }
}

TEST(DistributedDataParallel, AStepThatNobodyReducedIsRefusedByTheNext) {
  for (const bool allow_unused : {false, true})
    run_ranks(2, [&](const ParallelState& state) {
      RankGradient net;
      DistributedDataParallelConfig config;
      config.overlap_grad_reduce = allow_unused;
      config.allow_unused_parameters = allow_unused;
      DistributedDataParallel ddp(net, state, config);
      net.backward(state);
      EXPECT_TRUE(throws_with<UsageError>([&] { ddp.zero_grad(); }, kFinishFirst));
      ddp.finish_grad_sync();
      EXPECT_TRUE(at::equal(net.weight.grad(), at::full({4}, 3, at::kDouble)));
      ddp.zero_grad();
      net.backward(state);
      ddp.abandon_step();
      EXPECT_TRUE(at::equal(net.weight.grad(), at::zeros({4}, at::kDouble)));
    });
}

}  // namespace
}  // namespace lockstep
