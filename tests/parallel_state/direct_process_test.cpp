#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "lockstep/core/error.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/parallel_state/parallel_state.h"
#include "lockstep/parallel_state/process_group_state.h"
#include "lockstep/tests/support/launch.h"

// Processes that read each other's memory. They are forks of this one, which has loaded libtorch
// but started no thread.

namespace lockstep {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr int kRanks = 3;
constexpr int64_t kPart = 163'843;      ///< elements: several chunks
constexpr int kWrong = 3, kFailed = 4;  ///< exit statuses of a rank

using Body = std::function<bool(const ParallelState&)>;

/// A rank in its own process. Ends without destructors.
[[noreturn]] void be_rank(int rank, int port, const Body& body) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  at::set_num_threads(1);
  try {
    ParallelStateOptions options;
    options.timeout = std::chrono::seconds(20);
    static const ParallelState state(testing::environment_of(rank, kRanks, port), options);
    if (!body(state)) ::_exit(kWrong);
    barrier(state.world(), "end");
    ::_exit(0);
  } catch (const CommunicationError& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    ::_exit(kFailed);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d, not expected: %s\n", rank, error.what());
    ::_exit(1);
  }
}

std::vector<pid_t> start_ranks(const Body& body) {
  const int port = testing::free_port();
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.push_back(::fork());
    if (ranks.back() == 0) be_rank(rank, port, body);
  }
  return ranks;
}

/// The exit status of a rank. Kills it if it has not ended after half a minute.
int status_of(pid_t rank) {
  int status = 0;
  const auto deadline = Clock::now() + std::chrono::seconds(30);
  while (::waitpid(rank, &status, WNOHANG) == 0) {
    if (Clock::now() > deadline) ::kill(rank, SIGKILL);
    std::this_thread::sleep_for(milliseconds(1));
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

at::Tensor value_of(int64_t rank, int64_t round) {
  return at::arange(kRanks * kPart, at::kFloat).mul_(0.1).add_(static_cast<double>(rank + round));
}

/// Runs every kind of collective once and compares with ATen's arithmetic.
bool all_are_right(const ParallelState& state, int64_t round) {
  const int64_t rank = state.rank(), first = rank * kPart;
  const at::Tensor sum = value_of(0, round).add(value_of(1, round)).add(value_of(2, round));
  const at::Tensor whole = value_of(rank, round);
  const at::Tensor part = at::empty({kPart}), gathered = at::empty_like(whole);
  reduce_scatter(state.world(), part, whole, ReduceOp::sum, "test").wait();
  if (!at::equal(part, sum.narrow(0, first, kPart))) return false;
  all_gather(state.world(), gathered, part, "test").wait();
  if (!at::equal(gathered, sum)) return false;
  all_to_all(state.world(), gathered, whole, "test").wait();
  for (int64_t peer = 0; peer < kRanks; ++peer)
    if (!at::equal(gathered.narrow(0, peer * kPart, kPart),
                   value_of(peer, round).narrow(0, first, kPart)))
      return false;
  all_reduce(state.world(), whole, ReduceOp::sum, "test").wait();
  if (!at::equal(whole, sum)) return false;
  broadcast(state.world(), gathered, 1, "test").wait();
  return at::equal(gathered.narrow(0, 0, kPart), value_of(0, round).narrow(0, kPart, kPart));
}

bool reads(const ParallelState& state) {
  const auto& communicator = state.world().shared_state()->communicator;
  return communicator->transport(c10::kCPU).bytes_read().value_or(0) > 0;
}

TEST(DirectProcesses, ReadEachOther) {
  const auto ranks = start_ranks([](const ParallelState& state) {
    return all_are_right(state, 0) && all_are_right(state, 1) && reads(state);
  });
  for (const pid_t rank : ranks) EXPECT_EQ(status_of(rank), 0);
}

TEST(DirectProcesses, SendWhereTheEnvironmentOfOneSaysSo) {
  const auto ranks = start_ranks([](const ParallelState& state) {
    if (state.rank() == 1) ::setenv("LOCKSTEP_DIRECT_MEMORY", "0", 1);
    return all_are_right(state, 0) && !reads(state);
  });
  for (const pid_t rank : ranks) EXPECT_EQ(status_of(rank), 0);
}

TEST(DirectProcesses, AProcessThatDiesMakesTheOthersFailAndNothingWrong) {
  for (const int delay : {0, 20}) {
    int pipe[2] = {};
    ASSERT_EQ(::pipe(pipe), 0);
    const auto ranks = start_ranks([&](const ParallelState& state) {
      bool right = all_are_right(state, 0);
      if (::write(pipe[1], "", 1) != 1) return false;
      for (int64_t round = 1; right; ++round) right = all_are_right(state, round);
      return right;
    });
    for (int i = 0; i < kRanks; ++i) {
      char come = 0;
      ASSERT_EQ(::read(pipe[0], &come, 1), 1);
    }
    std::this_thread::sleep_for(milliseconds(delay));
    const auto start = Clock::now();
    ::kill(ranks[1], SIGKILL);
    EXPECT_EQ(status_of(ranks[0]), kFailed);
    EXPECT_EQ(status_of(ranks[2]), kFailed);
    EXPECT_EQ(status_of(ranks[1]), 128 + SIGKILL);
    EXPECT_LT(Clock::now() - start, std::chrono::seconds(15));
    for (const int end : pipe) ::close(end);
  }
}

}  // namespace
}  // namespace lockstep
