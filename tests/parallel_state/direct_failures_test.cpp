#include <gtest/gtest.h>

#include <chrono>
#include <optional>
#include <thread>
#include <vector>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/tests/parallel_state/forbidden_calls.h"
#include "lockstep/tests/support/rank_threads.h"

// Collectives that fail, or that the system restricts, while ranks read each other's memory.

namespace lockstep {
namespace {

using std::chrono::milliseconds;
using testing::errors_of_ranks;
using testing::forbid_threads;
using testing::run_ranks;

constexpr int64_t kBytes = 1 << 17;

TEST(DirectFailures, WhatChangesAfterAFailedWaitIsNotTaken) {
  const auto errors = errors_of_ranks(3, [](const ParallelState& state) {
    std::optional<ProcessGroup> pair;
    if (state.rank() != 2) barrier(pair.emplace(state.group_of_ranks("pair", {0, 1})), "begin");
    barrier(state.world(), "begin");
    const at::Tensor mine = at::ones({kBytes}, at::kByte), all = at::empty({2, kBytes}, at::kByte);
    if (state.rank() == 2) {
      std::this_thread::sleep_for(milliseconds(300));
      throw UsageError("rank 2 has had enough");
    }
    if (state.rank() == 1) {
      std::this_thread::sleep_for(milliseconds(2000));
      return all_gather(*pair, all, mine, "test").wait();
    }
    Work work = all_gather(*pair, all, mine, "test");
    std::this_thread::sleep_for(milliseconds(100));  // a worker runs it
    EXPECT_THROW(work.wait(), CommunicationError);
    mine.fill_(255);
    all.fill_(0);
    std::this_thread::sleep_for(milliseconds(4000));
    EXPECT_TRUE(all.eq(0).all().item<bool>());
  });
  EXPECT_EQ(errors[0], "");
  EXPECT_NE(errors[1].find("all_gather of test over group pair"), std::string::npos) << errors[1];
}

TEST(DirectFailures, AWaitThatBeginsLateNamesTheRankThatDoesNotCome) {
  const auto errors =
      errors_of_ranks(2,
                      [](const ParallelState& state) {
                        const at::Tensor tensor = at::ones({5});
                        std::vector<Work> works;
                        barrier(state.world(), "begin");
                        for (int i = 0; state.rank() == 0 && i < 3; ++i)
                          works.push_back(all_reduce(state.world(), tensor, ReduceOp::sum, "test"));
                        std::this_thread::sleep_for(milliseconds(1200));
                        // Both workers are busy, so this thread runs it.
                        if (state.rank() == 0) works.back().wait();
                        std::this_thread::sleep_for(milliseconds(3000));
                      },
                      {.timeout = milliseconds(1500)});
  EXPECT_NE(errors[0].find("rank 1: timed out"), std::string::npos) << errors[0];
}

TEST(DirectFailures, ATimeoutNamesTheRankThatDoesNotComeAfterALateOne) {
  const auto errors =
      errors_of_ranks(3,
                      [](const ParallelState& state) {
                        const at::Tensor tensor = at::ones({5});
                        barrier(state.world(), "begin");
                        if (state.rank() == 1) std::this_thread::sleep_for(milliseconds(1500));
                        if (state.rank() == 2) std::this_thread::sleep_for(milliseconds(8000));
                        Work work = all_reduce(state.world(), tensor, ReduceOp::sum, "test");
                        std::this_thread::sleep_for(milliseconds(100));  // a worker runs it
                        work.wait();
                      },
                      {.timeout = milliseconds(4000)});
  EXPECT_NE(errors[0].find("rank 2: timed out"), std::string::npos) << errors[0];
}

TEST(DirectFailures, AFailureThatThisRankPostsEndsItsWaits) {
  const auto errors = errors_of_ranks(2, [](const ParallelState& state) {
    barrier(state.world(), "begin");
    if (state.rank() == 1) return std::this_thread::sleep_for(milliseconds(4000));
    std::thread other([&] {
      std::this_thread::sleep_for(milliseconds(300));
      state.post_failure("another thread has had enough");
    });
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_THROW(all_reduce(state.world(), at::ones({5}), ReduceOp::sum, "test").wait(),
                 CommunicationError);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds(3000));
    other.join();
  });
  EXPECT_EQ(errors[1], "");
}

TEST(DirectFailures, OneWorkerIsEnoughWhereTheSystemHasNoMoreThreads) {
  run_ranks(2, [](const ParallelState& state) {
    barrier(state.world(), "begin");
    if (state.rank() == 1) std::this_thread::sleep_for(milliseconds(500));
    const at::Tensor first = at::ones({5}), second = at::ones({7});
    std::vector<Work> works;
    works.push_back(all_reduce(state.world(), first, ReduceOp::sum, "test"));
    std::this_thread::sleep_for(milliseconds(100));
    if (state.rank() == 0) forbid_threads();
    works.push_back(all_reduce(state.world(), second, ReduceOp::sum, "test"));
    for (Work& work : works) work.wait();
    EXPECT_TRUE(first.eq(2).all().item<bool>() && second.eq(2).all().item<bool>());
  });
}

}  // namespace
}  // namespace lockstep
