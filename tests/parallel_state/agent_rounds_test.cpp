// Ranks that torchrun starts again meet in the store of its agent, although each agent counts only
// the failures of its own ranks.

#include "lockstep/parallel_state/agent_rounds.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/parallel_state/parallel_state.h"
#include "lockstep/tests/support/launch.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using testing::free_port;

TEST(AgentRounds, ARankTakesTheNumberOnlyFromARank0ThatLives) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto number = [&](milliseconds patience) {
    return AgentRounds(store, "run").await(2, steady_clock::now() + patience);
  };
  EXPECT_EQ(AgentRounds(store, "run").begin(), 0);  // this rank 0 has died
  EXPECT_EQ(number(milliseconds(100)), std::nullopt);
  auto early = std::async(std::launch::async, number, milliseconds(20'000));
  std::this_thread::sleep_for(milliseconds(100));
  AgentRounds next(store, "run");
  EXPECT_EQ(next.begin(), 1);
  while (early.wait_for(milliseconds(5)) != std::future_status::ready) next.admit();
  EXPECT_EQ(early.get(), 1);
  auto late = std::async(std::launch::async, number, milliseconds(20'000));
  while (late.wait_for(milliseconds(5)) != std::future_status::ready) next.admit();
  EXPECT_EQ(late.get(), 1);
  EXPECT_EQ(AgentRounds(store, "another run").begin(), 0);
}

class InTheStoreOfAnAgent : public ::testing::Test {
 protected:
  InTheStoreOfAnAgent() {
    c10d::TCPStoreOptions options;
    options.port = static_cast<uint16_t>(port_);
    options.isServer = true;
    options.waitWorkers = false;
    agent_ = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  }

  /// What torchrun sets for one of `world` ranks whose agent has counted `restarts`.
  LaunchEnvironment environment_of(size_t rank, size_t world, int restarts) const {
    return read_launch_environment([=, this](const char* name) -> std::optional<std::string> {
      const std::pair<const char*, std::string> variables[] = {
          {"RANK", std::to_string(rank)},
          {"WORLD_SIZE", std::to_string(world)},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", std::to_string(port_)},
          {"TORCHELASTIC_USE_AGENT_STORE", "True"},
          {"TORCHELASTIC_RUN_ID", "job"},
          {"TORCHELASTIC_RESTART_COUNT", std::to_string(restarts)}};
      for (const auto& [known, value] : variables)
        if (std::string(known) == name) return value;
      return std::nullopt;
    });
  }

  static ParallelStateOptions options_for(milliseconds timeout = std::chrono::seconds(20)) {
    ParallelStateOptions options;
    options.timeout = timeout;
    return options;
  }

  /// One rank for each count. They come in the order of their ranks, or the other way round, and
  /// all add up their ranks. Returns their rounds.
  std::vector<int64_t> rounds(const std::vector<int>& counts, bool rank_0_last) {
    std::vector<int64_t> found(counts.size(), -1);
    std::vector<std::thread> ranks;
    for (size_t rank = 0; rank < counts.size(); ++rank)
      ranks.emplace_back([&, rank] {
        const size_t place = rank_0_last ? counts.size() - 1 - rank : rank;
        std::this_thread::sleep_for(milliseconds(100 * static_cast<int64_t>(place)));
        try {
          const ParallelState state(environment_of(rank, counts.size(), counts[rank]),
                                    options_for());
          const at::Tensor sum = at::full({1}, static_cast<int64_t>(rank), at::kLong);
          all_reduce(state.world(), sum, ReduceOp::sum, "rank").wait();
          const auto size = static_cast<int64_t>(counts.size());
          EXPECT_EQ(sum.item<int64_t>(), size * (size - 1) / 2);
          found[rank] = state.earlier_rounds().value_or(-2);
          const std::lock_guard lock(mutex_);
          left_.push_back(state);  // a process that is killed gives nothing back
        } catch (const std::exception& error) {
          ADD_FAILURE() << "rank " << rank << ": " << error.what();
        }
      });
    for (std::thread& rank : ranks) rank.join();
    return found;
  }

  const int port_ = free_port();
  c10::intrusive_ptr<c10d::TCPStore> agent_;
  std::mutex mutex_;
  std::vector<ParallelState> left_;
};

TEST_F(InTheStoreOfAnAgent, RanksMeetWhateverTheirAgentsHaveCounted) {
  using Rounds = std::vector<int64_t>;
  EXPECT_EQ(rounds({0, 0}, false), Rounds({0, 0}));
  EXPECT_EQ(rounds({1, 0}, true), Rounds({1, 1})) << "a rank of the first agent was lost";
  EXPECT_EQ(rounds({1, 0}, false), Rounds({2, 2})) << "an agent has joined: nobody counts that";
  EXPECT_EQ(rounds({1, 0, 0}, true), Rounds({3, 3, 3})) << "with more ranks than before";
  EXPECT_EQ(rounds({1, 2}, false), Rounds({4, 4}));
}

TEST_F(InTheStoreOfAnAgent, RanksThatHaveLeftMeetAgain) {
  std::vector<std::thread> ranks;
  for (size_t rank = 0; rank < 2; ++rank)
    ranks.emplace_back([&, rank] {
      for (int64_t round = 0; round < 3; ++round) {
        const ParallelState state(environment_of(rank, 2, 0), options_for());
        EXPECT_EQ(state.earlier_rounds(), round);
        barrier(state.world(), "end");
      }
    });
  for (std::thread& rank : ranks) rank.join();
}

TEST_F(InTheStoreOfAnAgent, ARank0ThatDoesNotComeIsNamed) {
  EXPECT_EQ(rounds({0, 0}, false), std::vector<int64_t>({0, 0}));
  EXPECT_TRUE(testing::throws_with<CommunicationError>(
      [&] { ParallelState(environment_of(1, 2, 0), options_for(milliseconds(1500))); },
      fmt::format("rank 1 cannot use the store at 127.0.0.1:{} (torchrun): rank 0 did not answer "
                  "within 1.5 s; it has not come, or has left the round",
                  port_)));
  EXPECT_TRUE(testing::throws_with<CommunicationError>(
      [&] { ParallelState(environment_of(0, 2, 0), options_for(milliseconds(1500))); },
      "rank 1 did not arrive within 1.5 s: 1 of 2 ranks have arrived (run id 'job/1')"));
}

TEST_F(InTheStoreOfAnAgent, ARankThatComesAfterARefusalLearnsOfIt) {
  std::vector<std::string> errors(3);
  std::vector<std::thread> ranks;
  const auto start = steady_clock::now();
  for (size_t rank = 0; rank < 3; ++rank)
    ranks.emplace_back([&, rank] {
      if (rank == 2) std::this_thread::sleep_for(milliseconds(700));
      ParallelStateOptions options = options_for();
      options.announcement = {{"answer", rank == 1 ? "43" : "42"}};
      try {
        const ParallelState state(environment_of(rank, 3, 0), options);
      } catch (const ConfigError& error) {
        errors[rank] = error.what();
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  for (std::thread& rank : ranks) rank.join();
  EXPECT_EQ(errors, std::vector<std::string>(
                        3, "answer: rank 0 has 42, rank 1 has 43; allowed: the same on all ranks"));
  EXPECT_LT(steady_clock::now() - start, milliseconds(3000)) << "rank 0 leaves with the last rank";
}

/// Rank 0 has failed before anybody else came.
TEST_F(InTheStoreOfAnAgent, ARankThatComesAfterRank0HasFailedLearnsOfIt) {
  std::vector<std::string> errors(2);
  std::vector<std::thread> ranks;
  const auto start = steady_clock::now();
  for (size_t rank = 0; rank < 2; ++rank)
    ranks.emplace_back([&, rank] {
      if (rank == 1) std::this_thread::sleep_for(milliseconds(700));
      ParallelStateOptions options = options_for();
      if (rank == 0) options.device = c10::Device(c10::kXPU, 0);  // libtorch has none
      try {
        const ParallelState state(environment_of(rank, 2, 0), options);
      } catch (const std::exception& error) {
        errors[rank] = error.what();
      }
    });
  for (std::thread& rank : ranks) rank.join();
  EXPECT_NE(errors[0], "");
  EXPECT_TRUE(errors[1].starts_with(
      "rank 0 failed before all ranks had met (run id 'job/0'): PyTorch is not linked with"))
      << errors[1];
  EXPECT_LT(steady_clock::now() - start, milliseconds(3000)) << "rank 0 leaves with the last rank";
}

}  // namespace
}  // namespace lockstep
