#include "lockstep/parallel_state/parallel_state.h"

#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <thread>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/backends.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/parallel_state/failure_reason.h"
#include "lockstep/parallel_state/gathering.h"
#include "lockstep/parallel_state/rendezvous.h"
#include "lockstep/tests/parallel_state/impatient_group.h"
#include "lockstep/tests/support/launch.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::run_ranks;

TEST(ParallelState, GroupsHoldTheRanksOfTheGrid) {
  run_ranks(
      8,
      [](const ParallelState& state) {
        for (const GroupKind kind : {GroupKind::tp, GroupKind::dp, GroupKind::pp, GroupKind::tp_pp,
                                     GroupKind::dp_cp, GroupKind::expert_dp, GroupKind::tp_dp_cp}) {
          const ProcessGroup group = state.group(kind);
          EXPECT_EQ(group.ranks(), state.grids().group_of(kind, state.rank()));
          EXPECT_EQ(group.ranks()[group.rank()], state.rank());
          at::Tensor tensor = at::full({1}, state.rank(), at::kLong);
          all_reduce(group, tensor, ReduceOp::sum, "rank").wait();
          int64_t sum = 0;
          for (const int64_t rank : group.ranks()) sum += rank;
          EXPECT_EQ(tensor.item<int64_t>(), sum) << group.to_string();
        }
      },
      {.sizes = {.tensor = 2, .pipeline = 2}});
}

TEST(ParallelState, KindsWithTheSameRanksShareOneCommunicator) {
  run_ranks(2, [](const ParallelState& state) {
    EXPECT_EQ(state.group(GroupKind::dp).c10d_group(), state.group(GroupKind::dp_cp).c10d_group());
    EXPECT_EQ(state.world().c10d_group(), state.group(GroupKind::dp).c10d_group());
    EXPECT_EQ(state.group(GroupKind::tp).c10d_group(), nullptr);
  });
}

TEST(ParallelState, AnyRanksFormAGroup) {
  run_ranks(4, [](const ParallelState& state) {
    if (state.rank() == 1) return;
    const ProcessGroup group = state.group_of_ranks("odd one out", {3, 0, 2});
    EXPECT_EQ(group.to_string(), "odd one out [3, 0, 2]");
    EXPECT_EQ(group.ranks()[group.rank()], state.rank());
    at::Tensor tensor = at::full({1}, state.rank(), at::kLong);
    broadcast(group, tensor, 0, "rank").wait();
    EXPECT_EQ(tensor.item<int64_t>(), 3);
    EXPECT_EQ(state.group_of_ranks("again", {3, 0, 2}).c10d_group(), group.c10d_group());
  });
}

TEST(ParallelState, ListsOfRanksThatAreNoGroupAreRefused) {
  const ParallelState state = ParallelState::single_process();
  EXPECT_EQ(state.group_of_ranks("alone", {0}).size(), 1);
  for (const RankList& ranks : {RankList{}, RankList{1}, RankList{0, 0}, RankList{-1, 0}})
    EXPECT_THROW(state.group_of_ranks("bad", ranks), UsageError);
}

/// Runs two ranks as threads. Returns the options of every backend that rank 0 creates.
std::vector<GroupOptions> backends_of_rank_0(
    ParallelStateOptions options, const std::function<void(const ParallelState&)>& body) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  options.sizes.world_size = 2;
  std::vector<GroupOptions> made;
  std::vector<std::thread> ranks;
  for (const int64_t rank : {0, 1})
    ranks.emplace_back([&, rank, options]() mutable {
      options.backend_factory = [&made, rank](const BackendSpec& spec) {
        if (rank == 0) made.push_back(spec.options);
        return make_gloo_backend(spec);
      };
      body(ParallelState(store, rank, options));
    });
  for (std::thread& rank : ranks) rank.join();
  return made;
}

TEST(ParallelState, AGroupIsMadeOnceHoweverManyThreadsAskForIt) {
  const auto made = backends_of_rank_0({}, [](const ParallelState& state) {
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i)
      threads.emplace_back([&] { EXPECT_EQ(state.group(GroupKind::dp).size(), 2); });
    for (std::thread& thread : threads) thread.join();
    const ParallelState copy = state;
    EXPECT_EQ(copy.world().c10d_group(), state.group(GroupKind::dp_cp).c10d_group());
  });
  EXPECT_EQ(made.size(), 1U);
}

TEST(ParallelState, OptionsOfAKindReachItsBackendAndItsTimeout) {
  ParallelStateOptions options;
  options.timeout = std::chrono::seconds(20);
  options.group_options = parse_group_options(
      {"dp: timeout_seconds=7, max_ctas=4", "ep: max_ctas=4, timeout_seconds=7"});
  options.sizes.expert = 2;
  const auto made = backends_of_rank_0(options, [](const ParallelState& state) {
    EXPECT_EQ(state.group(GroupKind::dp).timeout(), std::chrono::seconds(7));
    EXPECT_EQ(state.group(GroupKind::dp_cp).timeout(), std::chrono::seconds(20));
    EXPECT_NE(state.group(GroupKind::dp).c10d_group(), state.group(GroupKind::dp_cp).c10d_group());
    EXPECT_EQ(state.group(GroupKind::dp).c10d_group(), state.group(GroupKind::ep).c10d_group());
    barrier(state.group(GroupKind::dp), "test");
    barrier(state.group(GroupKind::dp_cp), "test");
  });
  ASSERT_EQ(made.size(), 2U);
  EXPECT_EQ(made[0].max_ctas, 4);
  EXPECT_EQ(made[1], GroupOptions());
}

TEST(ParallelState, AllGatherHasACommunicatorOfItsOwnOnlyWhenAskedFor) {
  for (const bool create : {false, true}) {
    ParallelStateOptions options;
    options.create_all_gather_groups = create;
    const auto made = backends_of_rank_0(options, [create](const ParallelState& state) {
      const ProcessGroup gather = state.all_gather_group(GroupKind::dp_cp);
      const ProcessGroup reduce = state.group(GroupKind::dp_cp);
      EXPECT_EQ(gather.ranks(), reduce.ranks());
      EXPECT_EQ(gather.name(), create ? "dp-cp all-gather" : "dp-cp");
      EXPECT_EQ(gather.c10d_group() == reduce.c10d_group(), !create);
      EXPECT_EQ(state.all_gather_group(GroupKind::expert_dp).c10d_group(), gather.c10d_group());
      EXPECT_THROW(state.all_gather_group(GroupKind::tp), UsageError);
      barrier(gather, "test");
    });
    EXPECT_EQ(made.size(), create ? 2U : 1U);
  }
}

TEST(ParallelState, ARankThatDoesNotComeToConnectAGroupIsNamed) {
  const auto errors = testing::errors_of_ranks(
      3,
      [](const ParallelState& state) {
        barrier(state.world(), "all have met");
        if (state.rank() == 1) {
          std::this_thread::sleep_for(std::chrono::seconds(2));
        } else {
          state.group(GroupKind::dp);
        }
      },
      testing::with_impatient_group(std::chrono::seconds(1)));
  for (const size_t rank : {0U, 2U}) {
    const std::string group = "group dp[0, 1, 2] could not be connected on rank ";
    EXPECT_TRUE(errors[rank].starts_with(group + std::to_string(rank) + " within 1.0 s: "))
        << errors[rank];
    // The later one of the two may repeat what the other has said.
    EXPECT_TRUE(errors[rank].ends_with(": rank 1 did not arrive to connect it")) << errors[rank];
  }
}

TEST(ParallelState, AGroupWhoseLastRankComesAtTheDeadlineIsConnected) {
  c10d::HashStore store;
  const auto last_rank_comes = [&]() -> std::optional<std::string> {
    note_here(store, 1);
    return std::nullopt;
  };
  EXPECT_EQ(gather(store, {0, 1}, 0, std::chrono::steady_clock::now(), last_rank_comes),
            std::nullopt);
}

/// In a store of the caller, and in one that rank 0 serves.
TEST(ParallelState, ARankThatFailsBeforeTheMeetingTellsTheOthersWhy) {
  const auto start = std::chrono::steady_clock::now();
  for (const int64_t failing : {0, 1, 2})
    for (const bool served : {false, true}) {
      const auto store = c10::make_intrusive<c10d::HashStore>();
      const int port = testing::free_port();
      std::vector<std::string> errors(3);
      std::vector<std::thread> ranks;
      for (const int64_t rank : {0, 1, 2})
        ranks.emplace_back([&, rank] {
          ParallelStateOptions options;
          options.sizes.world_size = 3;
          if (rank == failing) options.device = c10::Device(c10::kXPU, 0);  // libtorch has none
          try {
            served
                ? ParallelState(testing::environment_of(static_cast<int>(rank), 3, port), options)
                : ParallelState(store, rank, options);
          } catch (const std::exception& error) {
            errors[static_cast<size_t>(rank)] = reason_of(error);
          }
        });
      for (std::thread& rank : ranks) rank.join();
      const std::string& reason = errors[static_cast<size_t>(failing)];
      EXPECT_NE(reason.find("PyTorch is not linked with support for xpu devices"), reason.npos)
          << reason;
      for (const int64_t rank : {0, 1, 2}) {
        if (rank == failing) continue;
        EXPECT_EQ(errors[static_cast<size_t>(rank)],
                  fmt::format("rank {} failed before all ranks had met: {}", failing, reason));
      }
    }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

/// It has claimed its place and goes no further.
TEST(ParallelState, ARankThatHangsBeforeTheMeetingHasArrived) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  MembershipSpec spec;
  spec.run_id = "job";
  spec.rank = 1;
  spec.world_size = 2;
  const auto hangs = join_run(store, std::move(spec));
  ParallelStateOptions options;
  options.sizes.world_size = 2;
  options.run_id = "job";
  options.timeout = std::chrono::milliseconds(300);
  EXPECT_TRUE(testing::throws_with<CommunicationError>(
      [&] { ParallelState(store, 0, options); },
      "all 2 ranks have arrived, but not all have met within 0.3 s: one of them may hang (run id "
      "'job')"));
}

TEST(ParallelState, AFailureEndsTheWaitForAGroup) {
  const auto start = std::chrono::steady_clock::now();
  const auto errors = testing::errors_of_ranks(2, [](const ParallelState& state) {
    if (state.rank() == 1) throw UsageError("no text");
    state.world();
  });
  EXPECT_EQ(errors[0],
            "rank 1: no text; so group world[0, 1] could not be connected on rank 0 within 20.0 s");
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
}

TEST(ParallelState, ARankOutsideAGroupIsToldSo) {
  run_ranks(4,
            [](const ParallelState& state) {
              if (state.rank() == 0 || state.rank() == 3) {
                EXPECT_EQ(state.group(GroupKind::embedding).ranks(), (RankList{0, 3}));
              } else {
                EXPECT_THROW(state.group(GroupKind::embedding), UsageError);
              }
            },
            {.sizes = {.pipeline = 4}});
}

TEST(ParallelState, SizesThatDoNotFitAreRefusedBeforeAnyConnection) {
  LaunchEnvironment environment;
  environment.world_size = 4;
  environment.master_port = 1;  // nobody listens on it
  ParallelStateOptions options;
  options.sizes.tensor = 3;
  EXPECT_THROW(ParallelState(environment, options), ConfigError);
}

TEST(ParallelState, AStoreThatCannotBeReachedIsNamed) {
  LaunchEnvironment environment;
  environment.world_size = 2;
  environment.rank = 1;
  environment.master_port = 1;
  ParallelStateOptions options;
  options.timeout = std::chrono::milliseconds(300);
  try {
    const ParallelState state(environment, options);
    FAIL();
  } catch (const CommunicationError& error) {
    EXPECT_TRUE(std::string(error.what())
                    .starts_with("rank 1 cannot reach the store at 127.0.0.1:1 (single process)"))
        << error.what();
  }
}

TEST(ParallelState, RanksOutsideTheWorldAreRefused) {
  EXPECT_THROW(ParallelState(nullptr, 1, {}), ConfigError);
  ParallelStateOptions options;
  options.sizes.world_size = 2;
  EXPECT_THROW(ParallelState(nullptr, 0, options), ConfigError);
  LaunchEnvironment environment;
  environment.rank = 3;
  EXPECT_TRUE(testing::throws_with<ConfigError>([&] { ParallelState(environment, {}); },
                                                "rank 3 is outside the world of 1 ranks"));
}

TEST(ParallelState, TimeoutsThatNoClockCanTakeAreRefused) {
  using std::chrono::milliseconds;
  for (const milliseconds timeout : {milliseconds(0), milliseconds(-5), milliseconds::max()}) {
    ParallelStateOptions options;
    options.timeout = timeout;
    EXPECT_TRUE(testing::throws_with<ConfigError>(
        [&] { ParallelState(nullptr, 0, options); },
        "timeout: found " + std::to_string(timeout.count()) + " ms, allowed: 1 ms to 100 years"));
    options = ParallelStateOptions();
    options.group_options[GroupKind::dp_cp].timeout = timeout;
    EXPECT_TRUE(testing::throws_with<ConfigError>([&] { ParallelState(nullptr, 0, options); },
                                                  "dp-cp: timeout: found "));
  }
}

/// A store whose server can end.
struct EndingStore : c10d::HashStore {
  int64_t add(const std::string& key, int64_t value) override {
    if (ended) C10_THROW_ERROR(DistNetworkError, "the server has ended");
    return HashStore::add(key, value);
  }
  std::atomic<bool> ended = false;
};

TEST(ParallelState, AGroupThatTheStoreCannotConnectAnyMoreIsNamed) {
  const auto store = c10::make_intrusive<EndingStore>();
  const auto rank = [&](int64_t r) {
    ParallelStateOptions options;
    options.sizes.world_size = 2;
    const ParallelState state(store, r, options);
    store->ended = true;
    EXPECT_TRUE(testing::throws_with<CommunicationError>(
        [&] { state.world(); }, "group world[0, 1] could not be connected on rank " +
                                    std::to_string(r) + " within 60.0 s: the server has ended"));
  };
  std::thread other([&] { rank(1); });
  rank(0);
  other.join();
}

TEST(ParallelState, APeersDeathIsNoSignal) {
  ::signal(SIGPIPE, SIG_DFL);
  testing::run_ranks(2, [](const ParallelState& state) { barrier(state.world(), "test"); });
  struct sigaction action = {};
  ::sigaction(SIGPIPE, nullptr, &action);
  EXPECT_EQ(action.sa_handler, SIG_IGN);
}

}  // namespace
}  // namespace lockstep
