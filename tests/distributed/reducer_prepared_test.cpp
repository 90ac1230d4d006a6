// Backwards that were prepared: several at once, in any order, left out. RN: see
// reducer_buckets_test.cpp.

#include <gtest/gtest.h>

#include "lockstep/core/error.h"
#include "lockstep/tests/distributed/reducer_nets.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::all_equal_to;
using testing::CollectiveLog;
using testing::linear_loss;
using testing::named_zeros;
using testing::reduce;
using testing::replicas;
using testing::run_ranks;
using testing::throws_with;

/// The loss of a forward whose backward is prepared and comes later.
at::Tensor prepared(Reducer& reducer, const at::Tensor& loss) {
  reducer.prepare_for_forward();
  reducer.prepare_for_backward({loss});
  return loss;
}

void expect_unprepared(const std::function<void()>& backward) {
  EXPECT_TRUE(throws_with<UsageError>(
      backward, "'p0' received a gradient in a backward that was not prepared"));
}

TEST(Reducer, OneOfTwoPreparedBackwardsThatReachesNothingIsReducedToo) {
  for (const bool as_view : {true, false}) {
    CollectiveLog log;
    run_ranks(
        2,
        [&](const ParallelState& state) {
          const auto params = named_zeros({2});
          const auto rank = static_cast<double>(state.rank());
          Reducer reducer(params, replicas(state),
                          {.find_unused_parameters = true, .gradient_as_bucket_view = as_view});
          const at::Tensor input = at::ones({}, at::kDouble).requires_grad_(true);
          for (int step = 0; step < 3; ++step) {
            reducer.zero_grad_buffer();
            const at::Tensor first = prepared(reducer, linear_loss(params, {0}, 1 + rank));
            const at::Tensor second =
                prepared(reducer, state.rank() == 0 ? linear_loss(params, {0}, 10) : input * 2);
            first.backward();
            EXPECT_TRUE(all_equal_to(params[0].tensor.grad(), 1.5));
            second.backward();
            EXPECT_TRUE(all_equal_to(params[0].tensor.grad(), (11.5 + 1.5) / 2));
          }
        },
        {.log = &log});
    EXPECT_EQ(log.of_rank(0).size(), log.of_rank(1).size());
  }
}

TEST(Reducer, OutputsWithoutAGraphAreRefusedBeforeOtherPreparedBackwards) {
  const auto params = named_zeros({2});
  Reducer reducer(params, replicas(ParallelState::single_process()),
                  {.find_unused_parameters = true});
  prepared(reducer, at::zeros({}));  // is reduced at once
  const at::Tensor loss = prepared(reducer, linear_loss(params, {0}, 1));
  EXPECT_TRUE(throws_with<UsageError>([&] { prepared(reducer, at::zeros({})); },
                                      "prepare_for_backward: found no output with a graph; at "
                                      "least one must have a graph while other prepared backwards "
                                      "are pending (1)"));
}

TEST(Reducer, BackwardsMayRunInAnotherOrderThanTheyWerePrepared) {
  for (const bool find_unused : {true, false})
    run_ranks(2, [&](const ParallelState& state) {
      const auto params = named_zeros({2});
      const auto rank = static_cast<double>(state.rank());
      Reducer reducer(params, replicas(state), {.find_unused_parameters = find_unused});
      const at::Tensor first = prepared(reducer, linear_loss(params, {0}, 1 + rank));
      prepared(reducer, linear_loss(params, {0}, 10 + rank)).backward();
      EXPECT_TRUE(all_equal_to(params[0].tensor.grad(), 10.5));
      reduce(reducer, [&] { return linear_loss(params, {0}, 100 + rank); });
      EXPECT_TRUE(all_equal_to(params[0].tensor.grad(), 111));
      first.backward();
      EXPECT_TRUE(all_equal_to(params[0].tensor.grad(), 112.5));
    });
}

TEST(Reducer, TwoPreparedBackwardsMayStartFromTheSameOutput) {
  for (const bool find_unused : {true, false}) {
    const auto params = named_zeros({2});
    Reducer reducer(params, replicas(ParallelState::single_process()),
                    {.find_unused_parameters = find_unused});
    const at::Tensor out = prepared(reducer, linear_loss(params, {0}, 1));
    const at::Tensor first = out * 2, second = prepared(reducer, out) * 10;
    first.backward({}, /*retain_graph=*/true);
    EXPECT_TRUE(all_equal_to(params[0].tensor.grad(), 2));
    second.backward();
    EXPECT_TRUE(all_equal_to(params[0].tensor.grad(), 12));
    expect_unprepared([&] { linear_loss(params, {0}, 1).backward(); });
  }
}

/// A rank on which the part reaches no parameter must know, too, that it is still to come.
TEST(Reducer, APreparedBackwardMayRunAfterAnotherOneOfWhichItWasAPart) {
  for (const bool find_unused : {true, false})
    for (const bool part_comes_first : {true, false})
      run_ranks(2, [&](const ParallelState& state) {
        const auto params = named_zeros({2});
        Reducer reducer(params, replicas(state), {.find_unused_parameters = find_unused});
        const at::Tensor input = at::ones({}, at::kDouble).requires_grad_(true);
        const bool differ = find_unused && !part_comes_first;
        const at::Tensor part =
            differ && state.rank() == 1 ? input * 2 : linear_loss(params, {0}, 1);
        if (part_comes_first) prepared(reducer, part);
        const at::Tensor total = prepared(reducer, linear_loss(params, {0}, 10) + part * 4);
        if (!part_comes_first) prepared(reducer, part);
        total.backward({}, /*retain_graph=*/true);
        const double of_total = differ ? (14 + 10) / 2. : 14;
        EXPECT_TRUE(all_equal_to(params[0].tensor.grad(), of_total));
        part.backward();
        EXPECT_TRUE(all_equal_to(params[0].tensor.grad(), of_total + (differ ? 0.5 : 1)));
      });
}

TEST(Reducer, WithoutUnusedParametersOutputsMayLackAGraph) {
  const auto params = named_zeros({2});
  Reducer reducer(params, replicas(ParallelState::single_process()));
  const at::Tensor first = linear_loss(params, {0}, 1), second = linear_loss(params, {0}, 2);
  prepared(reducer, first.detach());
  prepared(reducer, second.detach());
  first.backward();
  EXPECT_TRUE(all_equal_to(params[0].tensor.grad(), 1));
  second.backward();
  EXPECT_TRUE(all_equal_to(params[0].tensor.grad(), 3));
  expect_unprepared([&] { linear_loss(params, {0}, 1).backward(); });
}

TEST(Reducer, PreparedBackwardsMayUseOtherParameters) {
  const auto params = named_zeros({2, 3});
  Reducer reducer(params, replicas(ParallelState::single_process()),
                  {.bucket_bytes_caps = {1},
                   .find_unused_parameters = true,
                   .skip_all_reduce_unused_params = true});
  const at::Tensor first = prepared(reducer, linear_loss(params, {0}, 1));
  const at::Tensor second = prepared(reducer, linear_loss(params, {1}, 2));
  first.backward();
  EXPECT_TRUE(all_equal_to(params[0].tensor.grad(), 1));
  const at::Tensor third = prepared(reducer, linear_loss(params, {0}, 4));
  second.backward();
  EXPECT_TRUE(all_equal_to(params[1].tensor.grad(), 2));
  third.backward();
  EXPECT_TRUE(all_equal_to(params[0].tensor.grad(), 5));
  reduce(reducer, [&] { return linear_loss(params, {0}, 8); });
  EXPECT_EQ(reducer.logging_data().integers.at("num_buckets_reduced"), 1);
}

TEST(Reducer, R33ABackwardThatWasPreparedAndLeftOutIsForgotten) {
  for (const bool find_unused : {true, false}) {
    const auto params = named_zeros({2});
    Reducer reducer(params, replicas(ParallelState::single_process()),
                    {.find_unused_parameters = find_unused});
    for (int step = 0; step < 2; ++step) {
      prepared(reducer, linear_loss(params, {0}, NAN));  // whose loss is not finite
      reduce(reducer, [&] { return linear_loss(params, {0}, 1); });
      EXPECT_TRUE(all_equal_to(params[0].tensor.grad(), 1 + step));
    }
    expect_unprepared([&] { linear_loss(params, {0}, 1).backward(); });
  }
}

/// R42 after a step whose backward was left out or was part of another one.
TEST(Reducer, R42WhatAnEarlierForwardUsedIsNotReduced) {
  for (const bool left_out : {true, false}) {
    const auto params = named_zeros({2, 3});
    Reducer reducer(params, replicas(ParallelState::single_process()),
                    {.bucket_bytes_caps = {1},
                     .find_unused_parameters = true,
                     .skip_all_reduce_unused_params = true});
    {
      const at::Tensor all = prepared(reducer, linear_loss(params, {0, 1}, 1));
      if (!left_out) prepared(reducer, all + linear_loss(params, {0}, 1)).backward();
    }
    for (int step = 0; step < 2; ++step) {
      reduce(reducer, [&] { return linear_loss(params, {0}, 1); });
      EXPECT_EQ(reducer.logging_data().integers.at("num_buckets_reduced"), 1);
    }
    expect_unprepared([&] { linear_loss(params, {0}, 1).backward(); });
  }
}

TEST(Reducer, GradientsThatTheCallerAsksForDoNotBeginAPreparedBackward) {
  const auto params = named_zeros({2});
  Reducer reducer(params, replicas(ParallelState::single_process()),
                  {.find_unused_parameters = true});
  const at::Tensor input = at::ones({}, at::kDouble).requires_grad_(true);
  const at::Tensor loss = prepared(reducer, linear_loss(params, {0}, 4) + input * 3);
  const auto of_input = torch::autograd::grad({loss}, {input}, /*grad_outputs=*/{},
                                              /*retain_graph=*/true);
  EXPECT_EQ(of_input[0].item<double>(), 3);
  EXPECT_FALSE(params[0].tensor.grad().defined());
  loss.backward();
  EXPECT_TRUE(all_equal_to(params[0].tensor.grad(), 4));
}

TEST(Reducer, ABackwardThatRanAsAPartIsForgottenWithItsGraph) {
  for (const bool find_unused : {true, false}) {
    const auto params = named_zeros({2});
    Reducer reducer(params, replicas(ParallelState::single_process()),
                    {.find_unused_parameters = find_unused});
    const auto run_both = [&] {
      const at::Tensor part = prepared(reducer, linear_loss(params, {0}, 1));
      prepared(reducer, part * 2).backward();
    };
    run_both();
    reducer.finalize_backward();
    {
      const auto guard = reducer.no_sync();
      linear_loss(params, {0}, 1).backward();
      reducer.finalize_backward();
    }
    reducer.prepare_for_forward();
    reducer.finalize_backward();
    run_both();
    expect_unprepared([&] { linear_loss(params, {0}, 1).backward(); });
  }
}

TEST(Reducer, FinalizingInsideNoSyncAsksForNoGradient) {
  const auto params = named_zeros({2});
  Reducer reducer(params, replicas(ParallelState::single_process()), {});
  const at::Tensor part = prepared(reducer, linear_loss(params, {0}, 1));  // stays alive
  prepared(reducer, part * 2).backward();
  reducer.finalize_backward();
  const auto guard = reducer.no_sync();
  linear_loss(params, {0}, 1).backward();
  reducer.finalize_backward();
  EXPECT_TRUE(all_equal_to(params[0].tensor.grad(), 2 + 1));
}

TEST(Reducer, WithUnusedParametersTwoBackwardsDoNotShareAnIteration) {
  const auto params = named_zeros({2, 3});
  Reducer reducer(params, replicas(ParallelState::single_process()),
                  {.find_unused_parameters = true});
  reducer.prepare_for_forward();
  const at::Tensor first = linear_loss(params, {1}, 1), second = linear_loss(params, {0}, 1);
  reducer.prepare_for_backward({first, second});
  first.backward();
  EXPECT_TRUE(throws_with<UsageError>([&] { second.backward(); },
                                      "an iteration ends with its first backward"));
}

}  // namespace
}  // namespace lockstep
