#include <gtest/gtest.h>

#include <thread>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/parallel_state/process_group_state.h"
#include "lockstep/tests/support/host_transport.h"
#include "lockstep/tests/support/launch.h"
#include "lockstep/tests/support/rank_threads.h"

// Ranks that do different things: every surviving rank reports which rank did what instead.

namespace lockstep {
namespace {

using std::chrono::milliseconds;
using testing::errors_of_ranks;
using testing::run_ranks;

void reduce(const ParallelState& state, const char* label, int64_t numel = 10,
            at::ScalarType dtype = at::kFloat) {
  const at::Tensor tensor = at::ones({numel}, dtype);
  all_reduce(state.group(GroupKind::dp), tensor, ReduceOp::sum, label).wait();
}

void expect_all_contain(const std::vector<std::string>& errors, const std::string& part) {
  for (size_t rank = 0; rank < errors.size(); ++rank)
    EXPECT_NE(errors[rank].find(part), std::string::npos)
        << "rank " << rank << ": " << errors[rank];
}

TEST(Desync, RanksInStepPass) {
  run_ranks(4,
            [](const ParallelState& state) {
              for (int step = 1; step < 4; ++step) {
                state.begin_step(step);
                reduce(state, "bucket 0");
                barrier(state.group(GroupKind::tp), "test");
                state.check_in_step();
              }
            },
            {.sizes = {.tensor = 2}});
}

TEST(Desync, ASkippedCollectiveOfTheSameSizeIsNoWrongSum) {
  const auto errors = errors_of_ranks(3,
                                      [](const ParallelState& state) {
                                        state.begin_step(7);
                                        reduce(state, "bucket 0");
                                        if (state.rank() != 1) reduce(state, "bucket 1");
                                        reduce(state, "bucket 2");
                                        if (state.rank() == 1) reduce(state, "bucket 3");
                                      },
                                      {.timeout = milliseconds(1500)});
  expect_all_contain(errors,
                     "the ranks diverge at operation 2 of the group: rank 0: all_reduce (sum) of "
                     "bucket 1, 10 x Float (step 7); rank 1: all_reduce (sum) of bucket 2, 10 x "
                     "Float (step 7); rank 2: all_reduce (sum) of bucket 1");
  expect_all_contain(errors, "over group dp [0, 1, 2] failed on rank ");
}

TEST(Desync, WhatABackendLetsPassIsFoundByTheComparison) {
  // As on NCCL, where two collectives of the same size meet whatever their purpose.
  const auto errors = errors_of_ranks(3, [](const ParallelState& state) {
    state.begin_step(7);
    reduce(state, "bucket 0");
    auto& ledger = state.group(GroupKind::dp).shared_state()->communicator->ledger();
    ledger.add(7, {CollectiveOperation::Kind::all_reduce, ReduceOp::sum},
               state.rank() == 2 ? "bucket 2" : "bucket 1", 10, "Float");
    state.check_in_step();
  });
  expect_all_contain(errors, "comparison of what the ranks have done over group dp [0, 1, 2]");
  expect_all_contain(errors,
                     "the ranks diverge at operation 2 of the group: rank 0: all_reduce (sum) of "
                     "bucket 1, 10 x Float (step 7); rank 1: all_reduce (sum) of bucket 1, 10 x "
                     "Float (step 7); rank 2: all_reduce (sum) of bucket 2");
}

TEST(Desync, ARankThatSkipsTheLastCollectiveIsNamedAtTheTimeout) {
  LOCKSTEP_NEEDS_HOST_TRANSPORT();
  const auto errors = errors_of_ranks(3,
                                      [](const ParallelState& state) {
                                        state.begin_step(3);
                                        reduce(state, "bucket 0");
                                        if (state.rank() != 1) reduce(state, "bucket 1");
                                        barrier(state.world(), "end of the step");
                                      },
                                      {.timeout = milliseconds(1500)});
  for (const int rank : {0, 2}) {
    EXPECT_TRUE(errors[rank].starts_with("all_reduce (sum) of bucket 1 over group dp [0, 1, 2]"))
        << errors[rank];
  }
  // The same ranks are one communicator: the barrier was rank 1's second operation there.
  expect_all_contain(errors,
                     "rank 0: all_reduce (sum) of bucket 1, 10 x Float (step 3); rank 1: "
                     "all_reduce (max) of end of the step, 1 x Byte (step 3)");
}

TEST(Desync, ARankThatWaitsElsewhereIsFoundThere) {
  const auto errors = errors_of_ranks(4,
                                      [](const ParallelState& state) {
                                        const ProcessGroup tp = state.group(GroupKind::tp),
                                                           dp = state.group(GroupKind::dp);
                                        if (state.rank() == 1)
                                          barrier(dp, "my own way");
                                        else
                                          barrier(tp, "layer 3");
                                        barrier(dp, "end");
                                      },
                                      {.sizes = {.tensor = 2}, .timeout = milliseconds(1500)});
  EXPECT_NE(
      errors[0].find("rank 1: has not reached it; it waits for all_reduce (max) of my own way "
                     "over group dp [1, 3]"),
      std::string::npos)
      << errors[0];
  for (const std::string& error : errors) EXPECT_NE(error, "");
}

TEST(Desync, AnotherSizeIsNamedOnAllRanks) {
  LOCKSTEP_NEEDS_HOST_TRANSPORT();
  const auto errors = errors_of_ranks(3,
                                      [](const ParallelState& state) {
                                        reduce(state, "bucket 0", state.rank() == 2 ? 400 : 300);
                                        state.check_in_step();
                                      },
                                      {.timeout = milliseconds(1500)});
  expect_all_contain(errors, "300 x Float (step 0)");
  expect_all_contain(errors, "rank 2: all_reduce (sum) of bucket 0, 400 x Float");
}

TEST(Desync, AnotherDtypeIsNamedOnAllRanks) {
  LOCKSTEP_NEEDS_HOST_TRANSPORT();
  const auto errors =
      errors_of_ranks(2,
                      [](const ParallelState& state) {
                        const bool first = state.rank() == 0;
                        reduce(state, "loss", first ? 20 : 10, first ? at::kFloat : at::kDouble);
                        state.check_in_step();
                      },
                      {.timeout = milliseconds(1500)});
  expect_all_contain(errors,
                     "rank 0: all_reduce (sum) of loss, 20 x Float (step 0); rank 1: all_reduce "
                     "(sum) of loss, 10 x Double (step 0)");
}

TEST(Desync, AnotherFactorIsNamedOnAllRanks) {
  LOCKSTEP_NEEDS_HOST_TRANSPORT();
  for (const bool scatters : {false, true}) {
    const auto errors =
        errors_of_ranks(3,
                        [&](const ParallelState& state) {
                          const Reduction mean(ReduceOp::sum, 1, state.rank() + 1);
                          const at::Tensor input = at::ones({12}), output = at::empty({4});
                          const ProcessGroup group = state.group(GroupKind::dp);
                          if (scatters)
                            reduce_scatter(group, output, input, mean, "loss").wait();
                          else
                            all_reduce(group, input, mean, "loss").wait();
                        },
                        {.timeout = milliseconds(1500)});
    const std::string name = scatters ? "reduce_scatter" : "all_reduce";
    expect_all_contain(errors,
                       "rank 0: " + name + " (sum) of loss, 12 x Float (step 0); rank 1: " + name +
                           " (sum, factor 1/2) of loss, 12 x Float (step 0); rank 2: " + name +
                           " (sum, factor 1/3) of loss");
  }
}

TEST(Desync, ARankThatHasEndedIsNamed) {
  const auto errors = errors_of_ranks(2,
                                      [](const ParallelState& state) {
                                        reduce(state, "bucket 0");
                                        if (state.rank() == 0) reduce(state, "bucket 1");
                                      },
                                      {.timeout = milliseconds(2000)});
  EXPECT_NE(errors[0].find("rank 1: has not reached it; its last was operation 1: all_reduce (sum) "
                           "of bucket 0, 10 x Float (step 0); it has ended"),
            std::string::npos)
      << errors[0];
  EXPECT_EQ(errors[1], "");
}

TEST(Desync, AMessageThatNobodySendsIsATimeoutThatNamesBothRanks) {
  const auto errors = errors_of_ranks(2,
                                      [](const ParallelState& state) {
                                        const ProcessGroup world = state.world();
                                        const at::Tensor tensor = at::ones({3});
                                        if (state.rank() == 0)
                                          receive(world, tensor, 1, "activations").wait();
                                        else
                                          std::this_thread::sleep_for(milliseconds(1500));
                                      },
                                      {.timeout = milliseconds(1000)});
  EXPECT_TRUE(errors[0].starts_with(
      "receive (from 1) of activations over group world [0, 1] failed on rank 0 after 1."))
      << errors[0];
}

TEST(Desync, AFailureEndsTheWaitForAMessage) {
  const auto start = std::chrono::steady_clock::now();
  const auto errors = errors_of_ranks(2, [](const ParallelState& state) {
    const ProcessGroup world = state.world();
    const at::Tensor tensor = at::ones({3});
    if (state.rank() == 0) receive(world, tensor, 1, "activations").wait();
    throw Error("out of cheese");
  });
  EXPECT_NE(errors[0].find("rank 1: out of cheese"), std::string::npos) << errors[0];
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

/// Rank 0 serves the store, and leaves two seconds after the failure.
TEST(Desync, ARankThatIsLateNamesTheFailureAndNotTheServerThatHasLeft) {
  const int port = testing::free_port();
  std::vector<std::string> errors(3);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 3; ++rank)
    ranks.emplace_back([&, rank] {
      try {
        ParallelStateOptions options;
        options.timeout = std::chrono::seconds(20);
        const ParallelState state(testing::environment_of(rank, 3, port), options);
        reduce(state, "bucket 0");
        if (rank == 1) {
          std::this_thread::sleep_for(milliseconds(200));  // the others have their sums
          return state.post_failure("no text");
        }
        if (rank == 2) std::this_thread::sleep_for(std::chrono::seconds(4));
        reduce(state, "bucket 1");
      } catch (const std::exception& error) {
        errors[static_cast<size_t>(rank)] = error.what();
      }
    });
  for (std::thread& rank : ranks) rank.join();
  EXPECT_EQ(errors[1], "");
  for (const size_t rank : {0, 2})
    EXPECT_TRUE(errors[rank].starts_with("rank 1: no text; so all_reduce (sum) of bucket 1"))
        << errors[rank];
}

}  // namespace
}  // namespace lockstep
