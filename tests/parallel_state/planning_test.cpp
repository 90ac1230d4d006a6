#include "lockstep/parallel_state/planning.h"

#include <gtest/gtest.h>

#include <algorithm>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::throws_with;

TEST(PlanningRank, AnswersAsIfAllHadSentTheSame) {
  const ParallelState state =
      ParallelState::planning_rank({.world_size = 1 << 20, .tensor = 4}, 1000002);
  const ProcessGroup tp = state.group(GroupKind::tp);
  EXPECT_EQ(tp.ranks(), (RankList{1000000, 1000001, 1000002, 1000003}));
  EXPECT_EQ(tp.rank(), 2);

  const at::Tensor tensor = at::arange(8, at::kDouble);
  all_reduce(tp, tensor, {ReduceOp::sum, 1, 2}, "test").wait();
  EXPECT_TRUE(at::equal(tensor, at::arange(8, at::kDouble) * 2));
  all_reduce(tp, tensor, ReduceOp::average, "test").wait();
  EXPECT_TRUE(at::equal(tensor, at::arange(8, at::kDouble) * 2));

  const at::Tensor part = at::zeros({2}, at::kDouble);
  reduce_scatter(tp, part, tensor, ReduceOp::max, "test").wait();
  EXPECT_TRUE(at::equal(part, at::tensor({8.0, 10.0}, at::kDouble)));
  all_gather(tp, tensor, part, "test").wait();
  EXPECT_TRUE(at::equal(tensor.view({4, 2}), part.expand({4, 2})));
  const at::Tensor output = at::zeros({8}, at::kDouble);
  all_to_all(tp, output, at::arange(8, at::kDouble), "test").wait();
  EXPECT_TRUE(at::equal(output, at::tensor({4, 5, 4, 5, 4, 5, 4, 5}, at::kDouble)));

  EXPECT_EQ(all_gather_texts(tp, "abc", "test"), std::vector<std::string>(4, "abc"));
  receive(tp, part, 0, "test").wait();
  EXPECT_TRUE(at::equal(part, at::zeros({2}, at::kDouble)));
  broadcast(tp, part, 3, "test").wait();
  barrier(tp, "test");
  state.check_in_step();
}

TEST(PlanningRank, BadSizesAreRefused) {
  EXPECT_TRUE(throws_with<ConfigError>([] { ParallelState::planning_rank({.world_size = 8}, 8); },
                                       "rank 8 is outside"));
  EXPECT_TRUE(throws_with<ConfigError>(
      [] { ParallelState::planning_rank({.world_size = 8, .tensor = 3}, 0); }, "not divisible"));
}

TEST(PlanningRank, TheObserverSeesEveryCall) {
  std::vector<CollectiveRecord> calls;
  const ParallelState state =
      ParallelState::planning_rank({.world_size = 4, .tensor = 2}, 3,
                                   [&](const CollectiveRecord& call) { calls.push_back(call); });
  broadcast(state.group(GroupKind::dp), at::zeros({5}), 1, "weights").wait();
  ASSERT_EQ(calls.size(), 1u);
  EXPECT_EQ(calls[0],
            (CollectiveRecord{3, "dp", {1, 3}, "broadcast (from 1)", "weights", "Float", 5, 20}));
}

TEST(PlanningRank, ARecordSaysWhatKindOfCallItIsAndWithWhom) {
  std::vector<CollectiveRecord> calls;
  const ParallelState state =
      ParallelState::planning_rank({.world_size = 8, .tensor = 2}, 5,
                                   [&](const CollectiveRecord& call) { calls.push_back(call); });
  const ProcessGroup dp = state.group(GroupKind::dp);  // ranks 1, 3, 5, 7
  const at::Tensor tensor = at::zeros({4});
  send(dp, tensor, 3, "there").wait();
  receive(dp, tensor, 0, "back").wait();
  all_to_all(dp, at::zeros({4}), tensor, "rows").wait();
  all_reduce(dp, tensor, ReduceOp::sum, "sum").wait();
  using Kind = CollectiveRecord::Kind;
  std::vector<std::pair<Kind, int64_t>> found;
  std::vector<std::string> shown;
  for (const CollectiveRecord& call : calls) {
    found.emplace_back(call.kind, call.peer);
    shown.push_back(call.operation);
  }
  EXPECT_EQ(found, (std::vector<std::pair<Kind, int64_t>>{{Kind::send, 7},
                                                          {Kind::receive, 1},
                                                          {Kind::uneven_collective, -1},
                                                          {Kind::collective, -1}}));
  EXPECT_EQ(shown, (std::vector<std::string>{"send (to 3)", "receive (from 0)", "all_to_all",
                                             "all_reduce (sum)"}));
}

const ParallelSizes kSizes = {.world_size = 64, .tensor = 2, .pipeline = 4};

/// One step: gradients over dp, then a chain of messages along the pipeline.
void step(const ParallelState& state, bool skip_a_bucket = false, const char* label = "activations",
          int64_t numel = 6) {
  for (const char* bucket : {"bucket 0", "bucket 1", "bucket 2"}) {
    if (skip_a_bucket && bucket == std::string("bucket 1")) continue;
    all_reduce(state.group(GroupKind::dp), at::ones({10}), ReduceOp::sum, bucket).wait();
  }
  const ProcessGroup pp = state.group(GroupKind::pp);
  const at::Tensor tensor = at::ones({numel});
  if (pp.rank() > 0) receive(pp, at::ones({6}), pp.rank() - 1, "activations").wait();
  if (pp.rank() < pp.size() - 1) send(pp, tensor, pp.rank() + 1, label).wait();
}

TEST(VerifyCollectives, RanksThatAgreePass) {
  EXPECT_EQ(verify_collectives(kSizes, [](const ParallelState& state) { step(state); }),
            std::nullopt);
}

TEST(VerifyCollectives, ASkippedBucketIsFoundAndNamed) {
  const auto difference = verify_collectives(
      kSizes, [](const ParallelState& state) { step(state, state.rank() == 13); });
  ASSERT_TRUE(difference.has_value());
  EXPECT_TRUE(
      difference->starts_with("group dp [1, 3, 5, 7, 9, 11, 13, 15]: the ranks diverge at "
                              "operation 2 of the group: rank 1: all_reduce (sum) of "
                              "bucket 1, 10 x Float (step 0); "))
      << *difference;
  EXPECT_NE(difference->find("rank 13: all_reduce (sum) of bucket 2"), std::string::npos);
}

TEST(VerifyCollectives, ABucketThatIsSkippedAtTheEndIsFound) {
  const auto difference = verify_collectives({.world_size = 3}, [](const ParallelState& state) {
    const at::Tensor tensor = at::ones({10});
    if (state.rank() != 1) all_reduce(state.world(), tensor, ReduceOp::sum, "the last").wait();
  });
  EXPECT_NE(difference.value_or("").find("rank 1: has not reached it"), std::string::npos);
}

TEST(VerifyCollectives, MessagesMustMeet) {
  const auto with_label = verify_collectives(kSizes, [](const ParallelState& state) {
    step(state, false, state.rank() == 17 ? "gradients" : "activations");
  });
  EXPECT_EQ(with_label.value_or(""),
            "message 1 from rank 17 to rank 33: send (to 2) of gradients, 6 x Float (step 0); "
            "receive (from 1) of activations, 6 x Float (step 0)");
  const auto with_size = verify_collectives(kSizes, [](const ParallelState& state) {
    step(state, false, "activations", state.rank() == 17 ? 7 : 6);
  });
  EXPECT_NE(with_size.value_or("").find("from rank 17 to rank 33"), std::string::npos);
  const auto unread = verify_collectives({.world_size = 2}, [](const ParallelState& state) {
    if (state.rank() == 0) send(state.world(), at::ones({1}), 1, "loss").wait();
  });
  EXPECT_EQ(unread.value_or(""),
            "message 1 from rank 0 to rank 1: send (to 1) of loss, 1 x Float (step 0); nothing is "
            "received");
}

/// What each rank of a world gathers under one label, in turn.
using GatheredTexts = std::vector<std::vector<std::string>>;

TEST(VerifyCollectives, TextsOfDifferentLengthsAreNoDifference) {
  for (const GatheredTexts& of_ranks :
       std::vector<GatheredTexts>{{{"a"}, {"long"}},
                                  {{"long"}, {"a"}},
                                  {{""}, {"long"}},
                                  {{"long"}, {""}},
                                  {{""}, {""}},
                                  {{"a", "longer"}, {"long", ""}},
                                  {{"", "a"}, {"longer", "long"}, {"b", ""}}}) {
    const ParallelSizes sizes = {.world_size = static_cast<int64_t>(of_ranks.size())};
    const auto gather = [&](const ParallelState& state) {
      for (const std::string& text : of_ranks[static_cast<size_t>(state.rank())])
        EXPECT_EQ(all_gather_texts(state.world(), text, "x"),
                  std::vector<std::string>(of_ranks.size(), text));
    };
    EXPECT_EQ(verify_collectives(sizes, gather), std::nullopt);
    EXPECT_TRUE(verify(gather, sizes).ok());
  }
}

TEST(VerifyCollectives, ATextThatOneRankDoesNotGatherIsFound) {
  const auto difference = verify_collectives({.world_size = 2}, [](const ParallelState& state) {
    all_gather_texts(state.world(), state.rank() == 0 ? "a" : "long", "x");
    if (state.rank() == 0) all_gather_texts(state.world(), "more", "x");
  });
  EXPECT_NE(difference.value_or("").find("rank 1: has not reached it"), std::string::npos);
}

TEST(VerifyCollectives, RanksRunOnceMoreOnlyIfALaterTextIsLonger) {
  const auto runs_with = [](const std::vector<std::string>& texts) {
    int runs = 0;
    verify_collectives(
        {.world_size = static_cast<int64_t>(texts.size())}, [&](const ParallelState& state) {
          ++runs;
          all_gather_texts(state.world(), texts[static_cast<size_t>(state.rank())], "x");
        });
    return runs;
  };
  EXPECT_EQ(runs_with({"long", "a", ""}), 3);
  EXPECT_EQ(runs_with({"a", "long", ""}), 6);
}

at::Tensor received_by(const ProcessGroup& group, int64_t source, const at::Tensor& into) {
  receive(group, into, source, "message").wait();
  return into;
}

TEST(VerifyCollectives, OnlySmallMessagesOfLowerRanksArrive) {
  const at::Tensor large = at::ones({1025}, at::kByte);
  const auto body = [&](const ParallelState& state) {
    const ProcessGroup world = state.world();
    if (state.rank() == 0) {
      send(world, at::tensor({3, 5}, at::kLong), 1, "message").wait();
      send(world, large, 1, "message").wait();
      send(world, at::full({2}, 0.5), 1, "message").wait();
      EXPECT_TRUE(at::equal(received_by(world, 1, at::ones({1})), at::zeros({1})));
      return;
    }
    EXPECT_TRUE(
        at::equal(received_by(world, 0, at::ones({2}, at::kLong)), at::tensor({3, 5}, at::kLong)));
    EXPECT_TRUE(at::equal(received_by(world, 0, at::ones_like(large)), at::zeros_like(large)));
    EXPECT_TRUE(at::equal(received_by(world, 0, at::ones({2})), at::full({2}, 0.5)));
    send(world, at::ones({1}), 0, "message").wait();
  };
  EXPECT_EQ(verify_collectives({.world_size = 2}, body), std::nullopt);
}

TEST(VerifyCollectives, GroupsOfOneNameAreToldApartByTheirRanks) {
  const auto body = [](const ParallelState& state) {
    for (const RankList& ranks : {RankList{1, 2}, {1, 3}, {0, 1, 2}, {1, 2, 3}}) {
      const auto position_of = [&](int64_t rank) {
        return std::find(ranks.begin(), ranks.end(), rank) - ranks.begin();
      };
      if (position_of(state.rank()) == static_cast<int64_t>(ranks.size())) continue;
      const ProcessGroup group = state.group_of_ranks("some", ranks);
      const at::Tensor message = at::full({1}, 10 * group.size() + ranks.back(), at::kLong);
      if (state.rank() == 1) send(group, message, group.size() - 1, "message").wait();
      if (state.rank() != ranks.back()) continue;
      EXPECT_TRUE(at::equal(received_by(group, position_of(1), at::ones_like(message)), message));
    }
  };
  EXPECT_EQ(verify_collectives({.world_size = 4}, body), std::nullopt);
}

TEST(Verify, AMessageOfARankThatIsRepresentedArrives) {
  const ParallelSizes sizes = {.world_size = 4, .tensor = 2, .pipeline = 2};
  std::vector<int64_t> ran;
  const auto body = [&](const ParallelState& state) {
    const ProcessGroup pp = state.group(GroupKind::pp);
    ran.push_back(state.rank());
    if (pp.rank() == 0) return send(pp, at::full({1}, 7, at::kLong), 1, "message").wait();
    EXPECT_EQ(received_by(pp, 0, at::zeros({1}, at::kLong)).item<int64_t>(), 7);
  };
  // Rank 1, from which rank 3 receives, does not run.
  const auto class_of = [](int64_t rank) { return std::max<int64_t>(rank, 1); };
  const OrderVerdict verdict = verify(body, sizes, class_of);
  EXPECT_TRUE(verdict.ok()) << verdict.to_string();
  EXPECT_EQ(ran, (std::vector<int64_t>{0, 2, 3}));
}

/// Rank 0 represents rank 1, whose pairs have the same distances.
TEST(Verify, AMessageOfARankThatIsRepresentedArrivesInTheGroupInWhichItWasSent) {
  const ParallelSizes sizes = {.world_size = 6, .tensor = 2, .pipeline = 3};
  const auto body = [](const ParallelState& state) {
    const int64_t own = state.rank() % 2;
    for (const int64_t distance : {2, 4}) {
      const at::Tensor message = at::full({1}, distance, at::kLong);
      const int64_t other = own + distance;
      if (state.rank() != own && state.rank() != other) continue;
      const ProcessGroup pair = state.group_of_ranks("pair", {own, other});
      if (state.rank() == own) {
        send(pair, message, 1, "message").wait();
      } else {
        EXPECT_TRUE(at::equal(received_by(pair, 0, at::ones_like(message)), message));
      }
    }
  };
  const auto class_of = [](int64_t rank) { return std::max<int64_t>(rank, 1); };
  const OrderVerdict verdict = verify(body, sizes, class_of);
  EXPECT_TRUE(verdict.ok()) << verdict.to_string();
}

TEST(VerifyCollectives, AnErrorNamesItsRank) {
  EXPECT_TRUE(throws_with<Error>(
      [] {
        verify_collectives({.world_size = 4}, [](const ParallelState& state) {
          if (state.rank() == 2) throw UsageError("no such layer");
        });
      },
      "planning rank 2 of 4: no such layer"));
}

TEST(VerifyCollectives, BadSizesAreRefused) {
  const auto nothing = [](const ParallelState&) {};
  for (const ParallelSizes& sizes :
       {ParallelSizes{.world_size = 0}, {.world_size = 8, .tensor = 3}})
    EXPECT_THROW(verify_collectives(sizes, nothing), ConfigError);
}

}  // namespace
}  // namespace lockstep
