#include "lockstep/parallel_state/parallel_state.h"

#include <gtest/gtest.h>

#include <csignal>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/tests/support/rank_threads.h"

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
  environment.master_port = 1;  // nobody listens there
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
