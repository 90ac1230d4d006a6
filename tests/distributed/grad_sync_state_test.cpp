#include "lockstep/distributed/grad_sync_state.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <random>

#include "lockstep/core/error.h"

namespace lockstep {
namespace {

using Phase = GradSyncState::Phase;
using Launch = GradSyncState::Launch;

/// Six parameters in three buckets: p0 p1 | p2 p3 | p4 p5.
GradSyncState make(bool overlap = true, bool allow_unused = false) {
  std::vector<GradSyncState::Param> params;
  for (int i = 0; i < 6; ++i) params.push_back({"p" + std::to_string(i), i / 2});
  return {params, 3, overlap, allow_unused};
}

void append(std::vector<int64_t>& order, const Launch& launch) {
  for (int64_t bucket = launch.first; bucket < launch.last; ++bucket) order.push_back(bucket);
}

std::string refusal(const std::function<void()>& call) {
  try {
    call();
    return "";
  } catch (const UsageError& error) {
    return error.what();
  }
}

const std::vector<int64_t> kAllBuckets = {0, 1, 2};

TEST(GradSyncState, EveryOrderOfSixGradientsLaunchesInOrderAndAsEarlyAsAllowed) {
  std::vector<int64_t> arrival(6);
  std::iota(arrival.begin(), arrival.end(), 0);
  int orders = 0;
  do {
    GradSyncState state = make();
    std::vector<int64_t> launched;
    std::vector<bool> arrived(6, false);
    for (const int64_t param : arrival) {
      append(launched, state.on_gradient(param, true));
      arrived[param] = true;
      // Reference: the longest prefix of buckets whose parameters have all arrived.
      size_t prefix = 0;
      while (prefix < 3 && arrived[2 * prefix] && arrived[2 * prefix + 1]) ++prefix;
      ASSERT_EQ(launched, std::vector<int64_t>(kAllBuckets.begin(), kAllBuckets.begin() + prefix));
    }
    ASSERT_TRUE(state.finish().empty());
    state.finished();
    ASSERT_EQ(state.phase(), Phase::ready);
    ++orders;
  } while (std::next_permutation(arrival.begin(), arrival.end()));
  EXPECT_EQ(orders, 720);
}

TEST(GradSyncState, EveryInterleavingOfTwoCountedMicrobatches) {
  // Each of 3 parameters in 2 buckets comes twice; all 6!/(2!2!2!) = 90 orders.
  std::vector<int64_t> arrival = {0, 0, 1, 1, 2, 2};
  int orders = 0;
  do {
    GradSyncState state({{"a", 0}, {"b", 0}, {"c", 1}}, 2, true, false);
    state.set_microbatches(2);
    std::vector<int> count(3, 0);
    std::vector<int64_t> launched;
    for (const int64_t param : arrival) {
      append(launched, state.on_gradient(param, true));
      ++count[param];
      const bool first = count[0] == 2 && count[1] == 2;
      const size_t expected = !first ? 0 : count[2] == 2 ? 2 : 1;
      ASSERT_EQ(launched.size(), expected);
    }
    ++orders;
  } while (std::next_permutation(arrival.begin(), arrival.end()));
  EXPECT_EQ(orders, 90);
}

TEST(GradSyncState, WithoutOverlapNothingLeavesBeforeTheEnd) {
  for (const bool explicit_start : {false, true}) {
    GradSyncState state = make(/*overlap=*/false);
    for (int64_t param = 0; param < 6; ++param) EXPECT_TRUE(state.on_gradient(param, true).empty());
    std::vector<int64_t> launched;
    if (explicit_start) append(launched, state.start());
    append(launched, state.finish());
    EXPECT_EQ(launched, kAllBuckets);
  }
}

TEST(GradSyncState, GradientsInsideNoSyncAccumulateAndStartSendsThem) {
  GradSyncState state = make();
  for (int pass = 0; pass < 3; ++pass)
    for (int64_t param = 0; param < 6; ++param)
      EXPECT_TRUE(state.on_gradient(param, false).empty());
  EXPECT_EQ(state.phase_text(), "accumulating 3");
  std::vector<int64_t> launched;
  append(launched, state.start());
  append(launched, state.start());  // a second start has nothing left to do
  append(launched, state.finish());
  EXPECT_EQ(launched, kAllBuckets);
}

TEST(GradSyncState, FinishAfterNoSyncAloneNamesAllParameters) {
  GradSyncState state = make();
  for (int64_t param = 0; param < 6; ++param) (void)state.on_gradient(param, false);
  EXPECT_EQ(refusal([&] { (void)state.finish(); }),
            "gradient sync: 6 of 6 parameters received no gradient in the last micro-batch (state "
            "accumulating 1): 'p0' (0/1), 'p1' (0/1), 'p2' (0/1), 'p3' (0/1), 'p4' (0/1), 'p5' "
            "(0/1); check that the loss depends on them, or set ddp.allow_unused_parameters");
  EXPECT_EQ(state.phase(), Phase::accumulating);
}

TEST(GradSyncState, FinishNamesTheParametersThatAreMissing) {
  GradSyncState state = make();
  for (const int64_t param : {0, 1, 3, 4}) (void)state.on_gradient(param, true);
  const std::string message = refusal([&] { (void)state.finish(); });
  EXPECT_TRUE(message.starts_with(
      "gradient sync: 2 of 6 parameters received no gradient in the last micro-batch (state "
      "reducing): 'p2' (0/1), 'p5' (0/1);"))
      << message;
}

TEST(GradSyncState, StartNamesTheParametersThatNeverGotAGradient) {
  GradSyncState state = make();
  for (const int64_t param : {0, 1, 2, 3, 4}) (void)state.on_gradient(param, false);
  const std::string message = refusal([&] { (void)state.start(); });
  EXPECT_TRUE(
      message.starts_with("gradient sync: 1 of 6 parameters received no gradient in any "
                          "micro-batch (state accumulating 1): 'p5' (0/1);"))
      << message;
}

TEST(GradSyncState, LongListsOfNamesAreCut) {
  std::vector<GradSyncState::Param> params;
  for (int i = 0; i < 50; ++i) params.push_back({"p" + std::to_string(i), 0});
  GradSyncState state(params, 1, true, false);
  const std::string message = refusal([&] { (void)state.finish(); });
  EXPECT_NE(message.find("'p19' (0/1), and 30 more;"), std::string::npos) << message;
  EXPECT_EQ(message.find("'p20'"), std::string::npos) << message;
}

TEST(GradSyncState, UnusedParametersAreAllowedOnRequest) {
  GradSyncState state = make(/*overlap=*/true, /*allow_unused=*/true);
  std::vector<int64_t> launched;
  for (const int64_t param : {0, 1, 4, 5}) append(launched, state.on_gradient(param, true));
  EXPECT_EQ(launched, std::vector<int64_t>{0});
  append(launched, state.finish());
  EXPECT_EQ(launched, kAllBuckets);
}

TEST(GradSyncState, UnusedParametersDoNotHideABackwardTooFew) {
  for (const bool counted : {true, false}) {
    GradSyncState state = make(/*overlap=*/true, /*allow_unused=*/true);
    state.set_microbatches(counted ? 2 : 1);
    for (const int64_t param : {0, 1, 4, 5}) (void)state.on_gradient(param, counted);
    const std::string message = refusal([&] { (void)state.finish(); });
    EXPECT_TRUE(message.starts_with("finish_grad_sync: came before the last of ")) << message;
    EXPECT_TRUE(message.ends_with("call start_grad_sync() after the last one")) << message;
    EXPECT_EQ(state.phase(), Phase::accumulating);
    std::vector<int64_t> launched;
    append(launched, state.start());  // declares that no more will come
    append(launched, state.finish());
    EXPECT_EQ(launched, kAllBuckets);
  }
}

TEST(GradSyncState, GX1OneBackwardTooManyNamesParameterAndCounts) {
  for (const bool overlap : {true, false}) {
    GradSyncState state = make(overlap);
    state.set_microbatches(2);
    for (int pass = 0; pass < 2; ++pass)
      for (int64_t param = 0; param < 6; ++param) (void)state.on_gradient(param, true);
    const std::string message = refusal([&] { (void)state.on_gradient(3, true); });
    EXPECT_TRUE(message.starts_with(
        "gradient sync: 'p3' received backward 3 of 2 expected in this step (state "))
        << message;
    EXPECT_NE(message.find("bucket 1"), std::string::npos) << message;
  }
}

TEST(GradSyncState, ASecondSynchronizedBackwardIsRefusedEvenBeforeItsBucketLeft) {
  GradSyncState state = make();
  (void)state.on_gradient(5, true);
  EXPECT_NE(refusal([&] { (void)state.on_gradient(5, true); }), "");
  EXPECT_NE(refusal([&] { (void)state.on_gradient(5, false); }), "");
}

TEST(GradSyncState, GradientsAfterStartAreRefused) {
  GradSyncState state = make();
  for (int64_t param = 0; param < 6; ++param) (void)state.on_gradient(param, false);
  (void)state.start();
  EXPECT_NE(refusal([&] { (void)state.on_gradient(0, false); }), "");
}

TEST(GradSyncState, GX3GradientsAfterTheReductionNeedAReset) {
  GradSyncState state = make();
  for (int64_t param = 0; param < 6; ++param) (void)state.on_gradient(param, true);
  (void)state.finish();
  state.finished();
  EXPECT_TRUE(refusal([&] { (void)state.on_gradient(0, true); })
                  .starts_with("gradient sync: 'p0' received a gradient, but the gradients of this "
                               "step are reduced already (state ready)"));
  EXPECT_NE(refusal([&] { (void)state.finish(); }), "");
  EXPECT_NE(refusal([&] { (void)state.start(); }), "");
  state.reset();
  EXPECT_EQ(state.phase_text(), "idle");
  EXPECT_NO_THROW((void)state.on_gradient(0, true));
}

TEST(GradSyncState, ResetWhileReducingIsRefused) {
  GradSyncState state = make();
  (void)state.on_gradient(0, true);
  (void)state.on_gradient(1, true);
  EXPECT_EQ(refusal([&] { state.reset(); }),
            "zero_grad_buffer: the state is reducing; call finish_grad_sync() first, or "
            "abandon_step() after an exception");
  EXPECT_NE(refusal([&] { state.finished(); }), "");
}

TEST(GradSyncState, AbandoningLaunchesTheRestFromEveryState) {
  for (const int gradients : {0, 1, 2, 3, 6}) {
    GradSyncState state = make();
    std::vector<int64_t> launched;
    for (int param = 0; param < gradients; ++param)
      append(launched, state.on_gradient(param, true));
    append(launched, state.abandon());
    EXPECT_EQ(launched, kAllBuckets) << gradients;
    EXPECT_EQ(state.phase(), Phase::ready);
    EXPECT_TRUE(state.abandon().empty());
    state.reset();
    EXPECT_EQ(state.phase(), Phase::idle);
  }
}

TEST(GradSyncState, MicrobatchesAreSetBetweenStepsOnly) {
  GradSyncState state = make();
  EXPECT_NE(refusal([&] { state.set_microbatches(0); }), "");
  (void)state.on_gradient(0, true);
  EXPECT_EQ(refusal([&] { state.set_microbatches(2); }),
            "set_num_microbatches: the state is accumulating 1, allowed: idle, ready");
}

TEST(GradSyncState, BadBucketsAreRefused) {
  EXPECT_EQ(refusal([] {
              GradSyncState({{"a", 1}}, 1, true, false);
            }),
            "parameter 'a': found bucket 1, allowed: 0 to 0");
  EXPECT_EQ(refusal([] { GradSyncState({{"a", 1}}, 2, true, false); }), "bucket 0 is empty");
}

TEST(GradSyncState, RandomStepsAgainstAReference) {
  std::mt19937 random(5);
  for (int trial = 0; trial < 3000; ++trial) {
    const int64_t buckets = 1 + random() % 5;
    std::vector<GradSyncState::Param> params;
    for (int64_t b = 0; b < buckets; ++b)
      for (unsigned i = 0; i <= random() % 3; ++i)
        params.push_back({"p" + std::to_string(params.size()), b});
    GradSyncState state(params, buckets, true, false);
    for (int step = 0; step < 3; ++step) {
      const int64_t microbatches = 1 + random() % 3;
      state.set_microbatches(microbatches);
      std::vector<int64_t> arrival;
      for (size_t p = 0; p < params.size(); ++p) arrival.insert(arrival.end(), microbatches, p);
      std::shuffle(arrival.begin(), arrival.end(), random);
      std::vector<int64_t> counts(params.size(), 0), launched;
      for (const int64_t param : arrival) {
        append(launched, state.on_gradient(param, true));
        ++counts[param];
        int64_t prefix = 0;
        const auto bucket_ready = [&](int64_t bucket) {
          for (size_t p = 0; p < params.size(); ++p)
            if (params[p].bucket == bucket && counts[p] < microbatches) return false;
          return true;
        };
        while (prefix < buckets && bucket_ready(prefix)) ++prefix;
        ASSERT_EQ(static_cast<int64_t>(launched.size()), prefix);
      }
      ASSERT_TRUE(std::is_sorted(launched.begin(), launched.end()));
      (void)state.finish();
      state.finished();
      state.reset();
    }
  }
}

TEST(GradSyncState, AnEarlyFinishIsToldFromAMissingParameter) {
  GradSyncState state = make();
  state.set_microbatches(2);
  const std::string message = refusal([&] { state.refuse_early_finish(); });
  EXPECT_TRUE(message.starts_with(
      "finish_grad_sync: came before the last of 2 backwards of this step (state idle): 'p0' "
      "(0/2), 'p1' (0/2)"))
      << message;
  for (int64_t param = 0; param < 6; ++param) (void)state.on_gradient(param, true);
  EXPECT_NE(refusal([&] { state.refuse_early_finish(); }), "");
  (void)state.on_gradient(0, true);
  EXPECT_NO_THROW(state.refuse_early_finish());  // finish() reports more
  EXPECT_NE(refusal([&] { (void)state.finish(); }), "");

  GradSyncState unused = make(/*overlap=*/true, /*allow_unused=*/true);
  unused.set_microbatches(2);
  EXPECT_NO_THROW(unused.refuse_early_finish());  // no parameter has been used
  (void)unused.on_gradient(0, true);
  EXPECT_NE(refusal([&] { unused.refuse_early_finish(); }), "");
}

TEST(GradSyncState, PassesTellTheMicrobatchesOfParametersThatAlternate) {
  using Passes = std::vector<int64_t>;
  const auto is_early = [](const Passes& passes, int64_t microbatches) {
    GradSyncState state = make(/*overlap=*/true, /*allow_unused=*/true);
    state.set_microbatches(microbatches);
    for (size_t i = 0; i < passes.size(); ++i) {
      (void)state.on_gradient(static_cast<int64_t>(i), true);
      state.note_pass(passes[i]);
    }
    return refusal([&] { state.refuse_early_finish(); }) != "";
  };
  EXPECT_TRUE(is_early({7}, 2));
  EXPECT_TRUE(is_early({7, 7}, 2));
  EXPECT_FALSE(is_early({7, 9}, 2));
  EXPECT_TRUE(is_early({7, 9}, 3));
  EXPECT_FALSE(is_early({1, 1, 4, 6}, 3));
  // 8 and 9 ran within 7.
  EXPECT_TRUE(is_early({8, 9, 7}, 2));
  EXPECT_FALSE(is_early({3, 8, 9, 7}, 2));
  EXPECT_TRUE(is_early({7, 8, 7, 9, 7}, 2));

  GradSyncState state = make(/*overlap=*/true, /*allow_unused=*/true);
  state.set_microbatches(2);
  for (const int64_t param : {0, 3}) {
    (void)state.on_gradient(param, true);
    state.note_pass(param);
  }
  EXPECT_EQ(state.finish().last, state.num_buckets());
  state.finished();
  state.reset();  // the next step counts from zero
  (void)state.on_gradient(0, true);
  state.note_pass(5);
  EXPECT_NE(refusal([&] { state.refuse_early_finish(); }), "");
}

TEST(GradSyncState, GradientsThatComeAfterTheirPassCountForIt) {
  struct Note {
    int64_t pass;
    bool outer = false;  ///< known to run inside no other
  };
  const auto is_early = [](const std::vector<Note>& notes, int64_t microbatches) {
    GradSyncState state = make(/*overlap=*/true, /*allow_unused=*/true);
    state.set_microbatches(microbatches);
    for (size_t i = 0; i < notes.size(); ++i) {
      (void)state.on_gradient(static_cast<int64_t>(i), true);
      notes[i].outer ? state.note_outer_pass(notes[i].pass) : state.note_pass(notes[i].pass);
    }
    return refusal([&] { state.refuse_early_finish(); }) != "";
  };
  // Backwards 4 and 6, then what they left for later.
  EXPECT_FALSE(is_early({{4}, {6}, {4, true}, {6, true}}, 2));
  EXPECT_FALSE(is_early({{4}, {6}, {4, true}}, 2));
  EXPECT_FALSE(is_early({{6}, {4, true}}, 2));
  EXPECT_FALSE(is_early({{4, true}, {6, true}}, 2));
  EXPECT_TRUE(is_early({{4, true}, {4, true}}, 2));
  EXPECT_FALSE(is_early({{4}, {6}, {-1}}, 2));  // outside of a pass
  EXPECT_TRUE(is_early({{-1}, {-1}}, 2));
}

TEST(GradSyncState, MessagesNameTheCallsOfTheirOwner) {
  GradSyncState state({{"a", 0}}, 1, true, false,
                      {.count = "COUNT",
                       .start = "START",
                       .finish = "FINISH",
                       .reset = "RESET",
                       .abandon = "ABANDON",
                       .allow_unused = "ALLOW",
                       .surplus = "SURPLUS"});
  const auto names = [&](auto call, const std::string& part) {
    return refusal(call).find(part) != std::string::npos;
  };
  EXPECT_TRUE(names([&] { state.set_microbatches(0); }, "COUNT: found 0"));
  EXPECT_TRUE(names([&] { (void)state.finish(); }, "or set ALLOW"));
  (void)state.on_gradient(0, true);
  EXPECT_TRUE(names([&] { state.reset(); },
                    "RESET: the state is reducing; call FINISH() first, or ABANDON() after"));
  EXPECT_TRUE(
      names([&] { (void)state.on_gradient(0, true); }, "SURPLUS, and call RESET() between"));
  (void)state.finish();
  state.finished();
  EXPECT_TRUE(names([&] { (void)state.on_gradient(0, true); }, "call RESET() before"));
  EXPECT_TRUE(names([&] { (void)state.finish(); }, "FINISH: the state is ready"));
  EXPECT_TRUE(names([&] { (void)state.start(); }, "START: the state is ready"));
}

}  // namespace
}  // namespace lockstep
