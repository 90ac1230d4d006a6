// What ranks make of values on a device that no host has looked at, and what becomes of operations
// that are under way when a communicator goes.

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "lockstep/models/embedding.h"
#include "lockstep/parallel_state/c10d_transport.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/parallel_state/communicator.h"
#include "lockstep/parallel_state/process_group_state.h"
#include "lockstep/tests/support/device/device_ranks.h"

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
          for (int i = 0; i < 20; ++i) x.mul_(1);  // what the sum has to wait for
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
