#include "lockstep/parallel_state/collectives.h"

#include <gtest/gtest.h>

#include <memory>
#include <thread>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/tests/support/allocation_counter.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::allocations;
using testing::CollectiveLog;
using testing::errors_of_ranks;
using testing::kLongText;
using testing::run_ranks;

TEST(Collectives, AllReduceOperations) {
  for (const int64_t n : {1, 2, 3, 4}) {
    run_ranks(n, [n](const ParallelState& state) {
      const auto mine = static_cast<double>(state.rank() + 1);
      const std::pair<ReduceOp, double> cases[] = {{ReduceOp::sum, n * (n + 1) / 2.0},
                                                   {ReduceOp::average, (n + 1) / 2.0},
                                                   {ReduceOp::max, static_cast<double>(n)},
                                                   {ReduceOp::min, 1.0}};
      for (const auto& [op, expected] : cases) {
        at::Tensor tensor = at::full({5}, mine, at::kDouble);
        all_reduce(state.world(), tensor, op, "test").wait();
        EXPECT_TRUE(at::equal(tensor, at::full({5}, expected, at::kDouble))) << to_string(op);
      }
    });
  }
}

TEST(Collectives, BroadcastAndAllGather) {
  run_ranks(3, [](const ParallelState& state) {
    at::Tensor tensor = at::full({2}, state.rank(), at::kLong);
    broadcast(state.world(), tensor, 2, "test").wait();
    EXPECT_TRUE(at::equal(tensor, at::full({2}, 2, at::kLong)));

    at::Tensor gathered = at::empty({3, 2});
    all_gather(state.world(), gathered, at::full({2}, static_cast<float>(state.rank())), "test")
        .wait();
    EXPECT_TRUE(at::equal(gathered, at::arange(3).to(at::kFloat).unsqueeze(1).expand({3, 2})));
  });
}

TEST(Collectives, AllGatherRefusesAWrongOutput) {
  const ParallelState state = ParallelState::single_process();
  at::Tensor output = at::empty({3});
  EXPECT_THROW((void)all_gather(state.world(), output, at::empty({2}), "test"), UsageError);
}

TEST(Collectives, TextsOfAnyLength) {
  run_ranks(3, [](const ParallelState& state) {
    const std::string mine(static_cast<size_t>(state.rank() * 5), 'x');
    const auto texts = all_gather_texts(state.world(), mine, "test");
    EXPECT_EQ(texts, (std::vector<std::string>{"", "xxxxx", "xxxxxxxxxx"}));
    EXPECT_EQ(all_gather_texts(state.world(), "", "test"), std::vector<std::string>(3));
  });
}

TEST(Collectives, OneRankDoesNotCommunicate) {
  const ParallelState state = ParallelState::single_process();
  at::Tensor tensor = at::ones({2});
  Work work = all_reduce(state.world(), tensor, ReduceOp::sum, "test");
  EXPECT_TRUE(work.is_completed());
  work.wait();
  at::Tensor output = at::zeros({2});
  all_gather(state.world(), output, tensor, "test").wait();
  EXPECT_TRUE(at::equal(output, tensor));
  EXPECT_EQ(all_gather_texts(state.world(), "a", "test"), std::vector<std::string>{"a"});
  EXPECT_EQ(state.world().c10d_group(), nullptr);
}

// 60000 * 3 overflows fp16, and 3 / 7 of most numbers is rounded.
TEST(Collectives, AFactorRoundsOnceWhereARankIsAlone) {
  const ParallelState state = ParallelState::single_process();
  for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16}) {
    const at::Tensor terms = at::cat({at::arange(1, 400), at::full({1}, 60000)}).to(dtype);
    const at::Tensor expected = (terms.to(at::kDouble) * 3 / 7).to(dtype);
    const at::Tensor reduced = terms.clone(), scattered = at::empty_like(terms);
    all_reduce(state.world(), reduced, {ReduceOp::sum, 3, 7}, "test").wait();
    reduce_scatter(state.world(), scattered, terms, {ReduceOp::sum, 3, 7}, "test").wait();
    EXPECT_TRUE(at::equal(reduced, expected)) << dtype;
    EXPECT_TRUE(at::equal(scattered, expected)) << dtype;
  }
}

TEST(Collectives, HandlesMayBeWaitedForTwiceAndInAnyOrder) {
  run_ranks(2, [](const ParallelState& state) {
    std::vector<at::Tensor> tensors;
    std::vector<Work> works;
    for (int i = 0; i < 20; ++i) {
      tensors.push_back(at::full({100}, i));
      works.push_back(all_reduce(state.world(), tensors.back(), ReduceOp::sum, "test"));
    }
    for (int i = 19; i >= 0; --i) {
      works[i].wait();
      works[i].wait();
      EXPECT_TRUE(at::equal(tensors[i], at::full({100}, 2 * i)));
    }
  });
}

TEST(Collectives, TheObserverSeesEveryCall) {
  CollectiveLog log;
  run_ranks(2,
            [](const ParallelState& state) {
              at::Tensor tensor = at::zeros({3}, at::kDouble);
              all_reduce(state.world(), tensor, ReduceOp::max, "test").wait();
            },
            {.log = &log});
  const auto calls = log.of_rank(1);
  ASSERT_EQ(calls.size(), 1u);
  EXPECT_EQ(calls[0],
            (CollectiveRecord{1, "world", {0, 1}, "all_reduce (max)", "test", "Double", 3, 24}));
}

/// Calls everything that has a label, once.
void call_each(const ParallelState& state, const std::string& label) {
  const ProcessGroup group = state.world();
  const int64_t other = 1 - group.rank();
  const at::Tensor one = at::ones({1}), two = at::ones({2});
  all_reduce(group, one, ReduceOp::sum, label).wait();
  reduce_scatter(group, one, two, ReduceOp::average, label).wait();
  all_gather(group, two, one, label).wait();
  all_to_all(group, at::empty({2}), two, label).wait();
  broadcast(group, one, 1, label).wait();
  Work arriving = receive(group, two, other, label);
  send(group, at::ones({2}), other, label).wait();
  arriving.wait();
  barrier(group, label);
}

TEST(Collectives, ALabelIsCopiedOnceAGroup) {
  run_ranks(2, [](const ParallelState& state) {
    const std::string label(kLongText, 'x');
    allocations = {};
    call_each(state, label);
    EXPECT_EQ(allocations.long_texts, 1);
    for (int i = 0; i < 100; ++i) call_each(state, label);
    EXPECT_EQ(allocations.long_texts, 1);
  });
}

TEST(Collectives, TheLabelMayGoBeforeTheWorkIsWaitedFor) {
  using std::chrono::milliseconds;
  const auto errors = errors_of_ranks(
      2,
      [](const ParallelState& state) {
        const ProcessGroup world = state.world();
        if (state.rank() == 1) return std::this_thread::sleep_for(milliseconds(2500));
        auto label = std::make_unique<std::string>("a label of more than fifteen characters");
        Work work = all_reduce(world, at::zeros({3}), ReduceOp::sum, *label);
        label->assign(label->size(), '?');
        label.reset();
        work.wait();
      },
      {.timeout = milliseconds(1000)});
  EXPECT_TRUE(
      errors[0].starts_with("all_reduce (sum) of a label of more than fifteen characters "
                            "over group world [0, 1] failed on rank 0 after "))
      << errors[0];
}

TEST(Collectives, ARankThatDoesNotComeIsATimeoutThatNamesGroupOperationAndLabel) {
  using std::chrono::milliseconds;
  const auto errors = errors_of_ranks(2,
                                      [](const ParallelState& state) {
                                        const ProcessGroup world = state.world();
                                        if (state.rank() == 1)
                                          return std::this_thread::sleep_for(milliseconds(2500));
                                        at::Tensor tensor = at::zeros({3});
                                        all_reduce(world, tensor, ReduceOp::sum, "bucket 7").wait();
                                      },
                                      {.timeout = milliseconds(1000)});
  EXPECT_TRUE(errors[0].starts_with(
      "all_reduce (sum) of bucket 7 over group world [0, 1] failed on rank 0 after "))
      << errors[0];
  EXPECT_NE(errors[0].find("(timeout 1.0 s)"), std::string::npos) << errors[0];
  EXPECT_EQ(errors[1], "");
}

TEST(Collectives, AFailedRankIsNamedLongBeforeTheTimeout) {
  const auto start = std::chrono::steady_clock::now();
  const auto errors =
      errors_of_ranks(3,
                      [](const ParallelState& state) {
                        const ProcessGroup world = state.world();
                        if (state.rank() == 1) {
                          state.post_failure("out of cheese");
                          return std::this_thread::sleep_for(std::chrono::seconds(2));
                        }
                        at::Tensor tensor = at::zeros({3});
                        all_reduce(world, tensor, ReduceOp::sum, "bucket 7").wait();
                      },
                      {.timeout = std::chrono::seconds(5)});
  for (const int rank : {0, 2})
    EXPECT_TRUE(
        errors[rank].starts_with("rank 1: out of cheese; so all_reduce (sum) of bucket 7 over "
                                 "group world [0, 1, 2] failed on "
                                 "rank " +
                                 std::to_string(rank) + " after "))
        << errors[rank];
  // Ranks 0 and 2 gave up early. The rest is rank 1's sleep and the end of their operations.
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(4));
}

TEST(Collectives, WhatCannotBeReducedIsRefused) {
  const auto errors_of = [](at::ScalarType dtype, ReduceOp op) {
    return errors_of_ranks(2, [=](const ParallelState& state) {
      const at::Tensor tensor = at::zeros({3}, dtype);
      all_reduce(state.world(), tensor, op, "counts").wait();
    });
  };
  for (const at::ScalarType dtype : {at::kInt, at::kComplexFloat})
    for (const std::string& error : errors_of(dtype, ReduceOp::average))
      EXPECT_EQ(error, std::string("all_reduce (average) of counts over group world [0, 1]: found "
                                   "an average of ") +
                           at::toString(dtype) + ", allowed: floating-point tensors");
}

TEST(Collectives, ATensorThatDoesNotFitEndsNothing) {
  run_ranks(2, [](const ParallelState& state) {
    const ProcessGroup group = state.world();
    const auto refused = [](auto call, const std::string& part) {
      EXPECT_TRUE(testing::throws_with<UsageError>(call, part));
    };
    for (const at::ScalarType dtype : {at::kBool, at::kComplexFloat, at::kFloat8_e5m2}) {
      const std::string found = std::string("x over group world [0, 1]: found ") +
                                at::toString(dtype) + ", allowed on the CPU: Float";
      const at::Tensor two = at::zeros({2}, dtype), one = at::zeros({1}, dtype);
      refused([&] { all_reduce(group, two, ReduceOp::max, "x").wait(); }, found);
      refused([&] { reduce_scatter(group, one, two, ReduceOp::sum, "x").wait(); }, found);
    }
    refused([&] { broadcast(group, at::Tensor(), 0, "x").wait(); }, "found an undefined tensor");
    const at::Tensor far = at::ones({2}, at::kMeta), half = at::ones({1}, at::kMeta);
    const std::string elsewhere = "found tensors on meta, allowed: cpu";
    refused([&] { all_reduce(group, far, ReduceOp::sum, "x").wait(); }, elsewhere);
    refused([&] { reduce_scatter(group, half, far, ReduceOp::sum, "x").wait(); }, elsewhere);
    refused([&] { all_gather(group, far, half, "x").wait(); }, elsewhere);
    refused([&] { all_to_all(group, far, far, "x").wait(); }, elsewhere);
    refused([&] { broadcast(group, far, 0, "x").wait(); }, elsewhere);
    refused([&] { send(group, far, 1 - state.rank(), "x").wait(); }, elsewhere);
    const at::Tensor complex = at::ones({1}, at::kComplexFloat);
    refused(
        [&] { all_gather(group, at::ones({2}, at::kComplexFloat), complex.conj(), "x").wait(); },
        "found a tensor that is conjugated or negated lazily");
    state.check_in_step();
    const at::Tensor sum = at::ones({1});
    all_reduce(group, sum, ReduceOp::sum, "after").wait();
    EXPECT_EQ(sum.item<float>(), 2);
  });
}

TEST(Collectives, AutogradRecordsNoneOfThemOnAnyNumberOfRanks) {
  for (const int64_t ranks : {1, 2})
    run_ranks(ranks, [](const ParallelState& state) {
      const ProcessGroup group = state.world();
      const at::Tensor x = at::ones({2}).requires_grad_(true);
      const at::Tensor gathered = at::empty({2 * group.size()}), moved = at::empty({2});
      all_gather(group, gathered, x, "x").wait();
      all_to_all(group, moved, x, "x").wait();
      EXPECT_FALSE(gathered.requires_grad() || moved.requires_grad());
      const at::Tensor leaf = at::empty({2 * group.size()}).requires_grad_(true);
      all_gather(group, leaf, x, "x").wait();
      EXPECT_TRUE(at::equal(leaf, at::ones({2 * group.size()})));
      all_reduce(group, x, {ReduceOp::sum, 1, 2}, "x").wait();
      EXPECT_TRUE(at::equal(x, at::full({2}, 0.5 * static_cast<double>(group.size()))));
    });
}

// A rank's own part is copied, so it would be written beyond the end of the output.
TEST(Collectives, ARankSendsItselfAsMuchAsItExpects) {
  run_ranks(2, [](const ParallelState& state) {
    const bool first = state.rank() == 0;
    const std::vector<int64_t> output_rows = {1, 1};
    const std::vector<int64_t> input_rows = {first ? 3 : 1, first ? 1 : 3};
    const at::Tensor input = at::ones({4, 1000});
    EXPECT_TRUE(testing::throws_with<UsageError>(
        [&] {
          all_to_all(state.world(), at::empty({2, 1000}), input, output_rows, input_rows, "x")
              .wait();
        },
        "all_to_all of x over group world [0, 1]: this rank has 12000 bytes for itself, and 4000 "
        "are expected"));
    EXPECT_TRUE(testing::throws_with<UsageError>(
        [&] {
          all_to_all(state.world(), at::empty({4, 1}), input, "x").wait();
        },
        "this rank has 8000 bytes for itself, and 8 are expected"));
    const at::Tensor flat = at::empty({4000});  // the same number of bytes in other rows
    all_to_all(state.world(), flat, input, "x").wait();
    EXPECT_TRUE(flat.eq(1).all().item<bool>());
  });
}

}  // namespace
}  // namespace lockstep
