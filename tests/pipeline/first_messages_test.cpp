// Hosts that wait for each other when the first message of a direction blocks them.
// schedule_property_test.cpp checks that no schedule does so, with or without connected pairs.

#include "lockstep/pipeline/first_messages.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "lockstep/core/error.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::throws_with;

StepLists interleaved(int64_t ranks, int64_t chunks) {
  return communication_steps(
      make_schedule({.pipeline = ranks, .virtual_pipeline = chunks, .microbatches = 2 * ranks}));
}

TEST(FirstMessages, PairsAreListedOnceAndAscend) {
  EXPECT_EQ(message_pairs(communication_steps(make_schedule({.pipeline = 4, .microbatches = 3}))),
            (RankPairs{{0, 1}, {1, 2}, {2, 3}}));
  EXPECT_EQ(message_pairs(interleaved(4, 2)), (RankPairs{{0, 1}, {0, 3}, {1, 2}, {2, 3}}));
  EXPECT_EQ(message_pairs(interleaved(2, 2)), (RankPairs{{0, 1}}));
  EXPECT_TRUE(message_pairs(communication_steps(make_schedule({.pipeline = 1}))).empty());
}

/// Each of three ranks receives from the one before it, and then sends to the one after it.
StepLists circle() {
  using Kind = PipelineStep::Kind;
  const PipelineTask task = {TaskKind::forward, 0, 0};
  StepLists steps;
  for (int64_t rank = 0; rank < 3; ++rank)
    steps.push_back({{Kind::receive, task, (rank + 2) % 3}, {Kind::send, task, (rank + 1) % 3}});
  return steps;
}

TEST(FirstMessages, RanksThatReceiveInACircleWaitForEachOther) {
  EXPECT_TRUE(throws_with<UsageError>(
      [] { check_first_messages(circle(), {}); },
      "the hosts wait for each other: rank 0 is stuck at its first message from rank 2, receive "
      "for F0.0 from rank 2; rank 1 is stuck at its first message from rank 0, receive for F0.0 "
      "from rank 0; rank 2 is stuck at its first message from rank 1, receive for F0.0 from rank "
      "1"));
  check_first_messages(circle(), message_pairs(circle()));
}

TEST(FirstMessages, AnyOrderThatAllRanksShareWillDo) {
  const StepLists steps = interleaved(4, 2);
  RankPairs pairs = message_pairs(steps);
  do check_first_messages(steps, pairs);
  while (std::next_permutation(pairs.begin(), pairs.end()));
}

TEST(FirstMessages, OnePairThatIsConnectedBreaksTheCircle) {
  const StepLists steps = circle();
  for (const auto& pair : message_pairs(steps)) check_first_messages(steps, {pair});
}

TEST(FirstMessages, RanksThatBothReceiveFirstAreStuck) {
  using Kind = PipelineStep::Kind;
  const PipelineTask f0 = {TaskKind::forward, 0, 0}, f1 = {TaskKind::forward, 1, 0};
  const StepLists steps = {{{Kind::receive, f0, 1}, {Kind::send, f1, 1}},
                           {{Kind::receive, f1, 0}, {Kind::send, f0, 0}}};
  EXPECT_TRUE(throws_with<UsageError>([&] { check_first_messages(steps, {}); },
                                      "rank 0 is stuck at its first message from rank 1"));
  check_first_messages(steps, {{0, 1}});
}

}  // namespace
}  // namespace lockstep
