// Hosts that wait for each other when the first message of a direction blocks them.
// schedule_property_test.cpp checks that no schedule does so once its pairs are connected.

#include "lockstep/pipeline/first_messages.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "lockstep/core/error.h"
#include "lockstep/pipeline/simulation.h"
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

TEST(FirstMessages, InterleavedPipelinesOfThreeRanksAndMoreWaitInACircle) {
  for (const auto& [ranks, chunks] :
       std::vector<std::pair<int64_t, int64_t>>{{3, 2}, {4, 2}, {8, 2}, {4, 4}}) {
    const StepLists steps = interleaved(ranks, chunks);
    EXPECT_TRUE(throws_with<UsageError>([&] { check_first_messages(steps, {}); },
                                        "rank 0 is stuck at its first message from rank " +
                                            std::to_string(ranks - 1) + ", receive for F0.1"));
    check_first_messages(steps, message_pairs(steps));
  }
}

TEST(FirstMessages, EveryRankThatIsStuckIsNamed) {
  EXPECT_TRUE(throws_with<UsageError>(
      [] { check_first_messages(interleaved(3, 2), {}); },
      "the hosts wait for each other: rank 0 is stuck at its first message from rank 2, receive "
      "for F0.1 from rank 2; rank 1 is stuck at its first message from rank 0, receive for F0.0 "
      "from rank 0; rank 2 is stuck at its first message from rank 1, receive for F0.0 from rank "
      "1"));
}

TEST(FirstMessages, AnyOrderThatAllRanksShareWillDo) {
  const StepLists steps = interleaved(4, 2);
  RankPairs pairs = message_pairs(steps);
  do check_first_messages(steps, pairs);
  while (std::next_permutation(pairs.begin(), pairs.end()));
}

TEST(FirstMessages, OnePairThatIsConnectedBreaksTheCircle) {
  const StepLists steps = interleaved(4, 2);
  for (const auto& pair : message_pairs(steps)) check_first_messages(steps, {pair});
}

TEST(FirstMessages, TheOtherSimulationsTakeNoNoticeOfThem) {
  const PipelineSchedule schedule =
      make_schedule({.pipeline = 3, .virtual_pipeline = 2, .microbatches = 6});
  EXPECT_NO_THROW(
      simulate_rendezvous(schedule, communication_steps(schedule), reference_cost(schedule)));
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
