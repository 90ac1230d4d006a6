// How ranks handle values on a device that no host has seen, and what happens to operations in
// flight when a communicator is destroyed.

#include <gtest/gtest.h>

#include <chrono>

#include <ATen/ATen.h>

#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/models/embedding.h"
#include "lockstep/parallel_state/c10d_transport.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/parallel_state/communicator.h"
#include "lockstep/parallel_state/process_group_state.h"
#include "lockstep/pipeline/executor.h"
#include "lockstep/tests/support/device/device_ranks.h"
#include "lockstep/tests/support/device/device_streams.h"
#include "lockstep/tests/support/small_net.h"

namespace lockstep::testing {
namespace {

TEST(DeviceValues, ATokenThatNobodyCouldCheckIsNaNOnAllRanksThatCutTheVocabulary) {
  for (const bool sequence_parallel : {false, true})
    run_device_ranks(2,
                     [&](const ParallelState& state) {
                       const ParallelContext context{
                           .state = state,
                           .options = at::TensorOptions(at::kDouble).device(state.device()),
                           .sequence_parallel = sequence_parallel,
                           .name = "table."};
                       const VocabParallelEmbedding table(context, 7, 4, 0.5, TableUse::one_way);
                       const at::Tensor tokens =
                           at::tensor({0, 6, 7, -1}, at::kLong).view({1, 4}).to(state.device());
                       const int64_t waits = device_counts(state.device().index()).waits;
                       const at::Tensor rows = table.embed(tokens);
                       EXPECT_EQ(device_counts(state.device().index()).waits, waits);
                       at::Tensor bad = at::tensor({0, 0, 1, 1}, at::kLong).to(at::kBool);
                       if (sequence_parallel) bad = bad.chunk(2)[state.rank()];
                       EXPECT_TRUE(at::equal(rows.cpu().isnan().all(-1).flatten(), bad));
                       EXPECT_TRUE(at::equal(rows.cpu().isnan().any(-1).flatten(), bad));
                     },
                     {.sizes = {.tensor = 2}});
}

TEST(DeviceValues, PairsAreConnectedInBothDirectionsBeforeTheirFirstMessage) {
  DeviceRankOptions options;
  options.rules = std::make_shared<NcclRules>();
  run_device_ranks(
      2,
      [&](const ParallelState& state) {
        const auto first_uses = [&] {
          const NcclCounts counts = options.rules->counts(state.rank());
          return counts.host_blocks - counts.communicators;
        };
        const ProcessGroup group = state.world();
        connect_pairs(group, {{0, 1}});
        EXPECT_EQ(first_uses(), 2);
        at::Tensor x = at::full({4}, state.rank(), at::TensorOptions(state.device()));
        for (const int sender : {0, 1})
          (state.rank() == sender ? send(group, x, 1 - sender, "x")
                                  : receive(group, x, sender, "x"))
              .wait();
        EXPECT_EQ(first_uses(), 2);
        EXPECT_EQ(x.sum().item<double>(), 0);
      },
      options);
}

TEST(DeviceValues, WhatIsMadeWithoutATensorIsOnTheDeviceOfTheRank) {
  run_device_ranks(3, [](const ParallelState& state) {
    EXPECT_EQ(current_device(), state.device().index());
    SmallNet net(3, at::kFloat, state.device());
    DistributedDataParallel ddp(net, state, DistributedDataParallelConfig());
    net.loss(SmallNet::samples(0, 4, at::kFloat).to(state.device())).backward();
    finalize_model_grads({&ddp}, at::ones({}, at::kLong));
    const at::Tensor before = net.parameters()[0].grad().cpu();
    ddp.offload_grad_buffers();
    ddp.restore_grad_buffers();
    EXPECT_TRUE(at::equal(net.parameters()[0].grad().cpu(), before));
  });
}

TEST(DeviceValues, AStageThatReturnsATensorOfTheHostIsRefusedBeforeItIsSent) {
  DeviceRankOptions options{.sizes = {.pipeline = 2}};
  options.timeout = std::chrono::seconds(60);
  const auto begin = std::chrono::steady_clock::now();
  const auto errors = errors_of_device_ranks(
      2,
      [](const ParallelState& state) {
        const PipelineExecutor executor(state, make_schedule({.pipeline = 2, .microbatches = 2}));
        const at::Tensor weight = at::ones({3}, state.device()).requires_grad_(true);
        executor.run({[&](int64_t, const at::Tensor& input) {
          return state.rank() == 0 ? (weight * 2).cpu() : (weight * input).sum();
        }});
      },
      options);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
  EXPECT_EQ(errors[0], "pipeline stage of chunk 0 of rank 0: found an output on cpu, allowed: " +
                           lagging_device(0).str() + ", the device of the job");
}

TEST(DeviceValues, ACommunicatorThatGoesLetsTheOperationsOfC10dEnd) {
  for (uint64_t seed = 1; seed <= 5; ++seed)
    run_device_ranks(
        3,
        [](const ParallelState& state) {
          const auto group = state.world();
          const auto& known = *group.shared_state();
          at::Tensor x = at::ones({1000}, state.device());
          all_reduce(group, x, ReduceOp::sum, "first").wait();
          auto of_its_own = std::make_unique<Communicator>(
              known.communicator->c10d(), nullptr,
              std::make_unique<C10dTransport>(known.communicator->c10d(), state.device()),
              known.guard->ledger("another"), known.failures);
          for (int i = 0; i < 20; ++i) x.mul_(1);  // the sum has to wait for these
          std::vector<at::Tensor> one = {x};
          const auto work = known.communicator->c10d()->allreduce(one);
          of_its_own.reset();
          EXPECT_TRUE(work->isCompleted());
          work->wait();
          EXPECT_EQ(x.sum().item<double>(), 9000) << "rank " << state.rank();
        },
        {.device = {.seed = seed, .delayed = 0.5}});
}

}  // namespace
}  // namespace lockstep::testing
