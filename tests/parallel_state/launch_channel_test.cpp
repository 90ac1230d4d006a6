#include "lockstep/parallel_state/launch_channel.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <thread>

#include "lockstep/core/error.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;

constexpr char kVariable[] = "LOCKSTEP_LAUNCH_CHANNEL";

/// Both ends in one process.
struct Ends {
  Ends() : launcher(std::make_unique<RankChannel>()) {
    launcher->hand_over(/*slot=*/2);
    const int of_rank = ::dup(std::stoi(std::getenv(kVariable)));
    ::setenv(kVariable, std::to_string(of_rank).c_str(), 1);
    launcher->keep_own_end();
    rank = LaunchChannel::of_this_process();
  }

  std::unique_ptr<RankChannel> launcher;
  std::unique_ptr<LaunchChannel> rank;
};

TEST(LaunchChannel, WhatARankSaysReachesTheLauncher) {
  const Ends ends;
  EXPECT_FALSE(ends.launcher->receive());
  ends.rank->announce(milliseconds(60'000), "runs/a folder");
  const auto first = ends.launcher->receive();
  EXPECT_EQ(first->timeout, milliseconds(60'000));
  EXPECT_EQ(first->folder, "runs/a folder");
  ends.launcher->give({{}, 1, "done"});
  ends.rank->wait_for_order({{4, 2}, "train.micro_batch_size = 2", "0 1 2\n3 4\n"});
  const auto word = ends.launcher->receive();
  EXPECT_EQ(word->waits->world_sizes, (std::vector<int64_t>{4, 2}));
  EXPECT_EQ(word->waits->limits, "train.micro_batch_size = 2");
  EXPECT_EQ(word->waits->copies, "0 1 2\n3 4\n");
  EXPECT_FALSE(word->timeout);
}

TEST(LaunchChannel, ARankThatFitsNoNumberSaysSo) {
  const Ends ends;
  ends.launcher->give({{}, 1, ""});
  ends.rank->wait_for_order({{}, "limits"});
  const auto word = ends.launcher->receive();
  EXPECT_TRUE(word->waits->world_sizes.empty());
  EXPECT_EQ(word->waits->limits, "limits");
}

TEST(LaunchChannel, ARoundThatIsOverStaysOverUntilTheNextOne) {
  const Ends ends;
  EXPECT_FALSE(ends.rank->round_is_over());
  ends.launcher->tell_round_is_over("rank 2 has ended");
  for (int i = 0; i < 2; ++i) EXPECT_EQ(ends.rank->round_is_over(), "rank 2 has ended");
  ends.launcher->give({{{"RANK", "1"}, {"MASTER_ADDR", "a=b"}}, {}, ""});
  const LaunchOrder order = ends.rank->wait_for_order({{1}, ""});
  EXPECT_EQ(order.round, (VariableList{{"RANK", "1"}, {"MASTER_ADDR", "a=b"}}));
  EXPECT_FALSE(order.status);
  EXPECT_FALSE(ends.rank->round_is_over());
}

TEST(LaunchChannel, TheEndHasAStatusAndAReason) {
  const Ends ends;
  ends.launcher->give({{}, 3, "two\nlines"});
  LaunchOrder order = ends.rank->wait_for_order({});
  EXPECT_EQ(order.status, 3);
  EXPECT_EQ(order.reason, "two\nlines");
  ends.launcher->give({{}, 0, ""});
  order = ends.rank->wait_for_order({});
  EXPECT_EQ(order.status, 0);
  EXPECT_EQ(order.reason, "");
}

TEST(LaunchChannel, ARankWaitsForALauncherThatIsSlow) {
  const Ends ends;
  std::thread launcher([&] {
    std::this_thread::sleep_for(milliseconds(50));
    ends.launcher->give({{{"RANK", "0"}}, {}, ""});
  });
  EXPECT_EQ(ends.rank->wait_for_order({}).round.size(), 1U);
  launcher.join();
}

TEST(LaunchChannel, AnOrderIsToldOfBeforeItIsRead) {
  const Ends ends;
  ends.launcher->tell_round_is_over("rank 2 has ended");
  ends.launcher->give({{}, 3, "the end"});
  int calls = 0;
  const LaunchOrder order = ends.rank->wait_for_order({}, [&] {
    ++calls;
    EXPECT_EQ(ends.rank->round_is_over(), "3\nthe end");
  });
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(order.status, 3);
  EXPECT_FALSE(ends.rank->round_is_over());
}

TEST(LaunchChannel, ALauncherThatHasGoneIsAnError) {
  Ends ends;
  ends.launcher = nullptr;
  EXPECT_THROW(ends.rank->wait_for_order({}), CommunicationError);
}

TEST(LaunchChannel, WithoutALauncherThereIsNone) {
  for (const char* const value : {"", "no number", "1", "999", "-4"}) {
    ::setenv(kVariable, value, 1);
    EXPECT_EQ(LaunchChannel::of_this_process(), nullptr) << value;
  }
  const int file = ::open("/dev/null", O_RDONLY);
  ::setenv(kVariable, std::to_string(file).c_str(), 1);
  EXPECT_EQ(LaunchChannel::of_this_process(), nullptr);
  ::close(file);
  ::unsetenv(kVariable);
  EXPECT_EQ(LaunchChannel::of_this_process(), nullptr);
}

TEST(LaunchChannel, TheSlotStandsForTheLocalRank) {
  const Ends ends;  // of slot 2
  LaunchEnvironment environment;
  environment.local_rank = 0;
  for (const auto& [ranks, wanted] : {std::pair(2, 3), std::pair(3, 3), std::pair(4, 4)}) {
    environment.local_world_size = ranks;
    const LaunchEnvironment found = LaunchChannel::in_slot(environment);
    EXPECT_EQ(found.local_rank, 2);
    EXPECT_EQ(found.local_world_size, wanted);
  }
  ::unsetenv(kSlotVariable);
  EXPECT_EQ(LaunchChannel::in_slot(environment).local_rank, 0);
}

TEST(LaunchChannel, TheVariablesOfARoundLieOverTheEnvironment) {
  const EnvironmentReader read =
      over({{"RANK", "1"}}, [](const char* name) { return std::string("outer ") + name; });
  EXPECT_EQ(read("RANK"), "1");
  EXPECT_EQ(read("WORLD_SIZE"), "outer WORLD_SIZE");
}

}  // namespace
}  // namespace lockstep
