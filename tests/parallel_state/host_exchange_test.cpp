#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/tests/support/host_transport.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/throws_with.h"

// Sums, reduce-scatter and all-gather of CPU tensors, compared with ATen's arithmetic.

namespace lockstep {
namespace {

using testing::BackendLog;
using testing::run_ranks;
using testing::throws_with;

/// Bytes of the message with which a new group checks its connections.
constexpr int64_t kGreeting = 1;

/// The tensor of one rank.
at::Tensor term(int64_t rank, int64_t numel, at::ScalarType dtype) {
  return (at::sin(at::arange(numel, at::kDouble) * 0.37 + static_cast<double>(rank)) * 100)
      .to(dtype);
}

/// The terms of all ranks, each times numerator / denominator, added from left to right. Half types
/// are added in fp32.
at::Tensor left_to_right(int64_t ranks, int64_t numel, at::ScalarType dtype,
                         const Reduction& reduction) {
  const bool half = dtype == at::kBFloat16 || dtype == at::kHalf;
  at::Tensor sum;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    at::Tensor next = term(rank, numel, dtype).to(half ? at::kFloat : dtype);
    if (reduction.scales()) next = next.mul(reduction.numerator).div(reduction.denominator);
    sum = rank == 0 ? next : sum.add(next);
  }
  if (reduction.op == ReduceOp::average) sum = sum.div(ranks);
  return sum.to(dtype);
}

TEST(HostExchange, AllReduceAddsInRankOrderWhateverTheSize) {
  LOCKSTEP_NEEDS_HOST_TRANSPORT();
  for (const int64_t n : {2, 3, 4, 5})
    run_ranks(n, [n](const ParallelState& state) {
      for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf})
        for (const int64_t numel : {0, 1, 2, 3, 7, 1000, 100003})
          for (const Reduction& reduction :
               {Reduction(ReduceOp::sum), Reduction(ReduceOp::average),
                Reduction(ReduceOp::sum, 1, 3), Reduction(ReduceOp::average, 2, 7)}) {
            const at::Tensor tensor = term(state.rank(), numel, dtype);
            all_reduce(state.world(), tensor, reduction, "test").wait();
            EXPECT_TRUE(at::equal(tensor, left_to_right(n, numel, dtype, reduction)))
                << n << " ranks, " << numel << " x " << dtype << ", " << to_string(reduction.op)
                << " of " << reduction.numerator << "/" << reduction.denominator;
          }
    });
}

TEST(HostExchange, AMessageOfManyChunks) {
  LOCKSTEP_NEEDS_HOST_TRANSPORT();
  for (const int64_t n : {2, 3})
    run_ranks(n, [n](const ParallelState& state) {
      const int64_t numel = n * 5 * (1 << 18) + 12345;  // more chunks than are in flight at once
      const at::Tensor tensor = term(state.rank(), numel, at::kFloat);
      all_reduce(state.world(), tensor, {ReduceOp::sum, 1, n}, "test").wait();
      EXPECT_TRUE(at::equal(tensor, left_to_right(n, numel, at::kFloat, {ReduceOp::sum, 1, n})));
    });
}

TEST(HostExchange, ReduceScatterHasTheBitsOfAllReduce) {
  LOCKSTEP_NEEDS_HOST_TRANSPORT();
  for (const int64_t n : {2, 3, 4})
    run_ranks(n, [n](const ParallelState& state) {
      for (const int64_t numel : {1, 5, 40001}) {
        const at::Tensor input = term(state.rank(), n * numel, at::kFloat);
        const at::Tensor whole = input.clone();
        all_reduce(state.world(), whole, ReduceOp::sum, "test").wait();
        const at::Tensor expected = whole.narrow(0, state.rank() * numel, numel);
        const at::Tensor output = at::empty({numel});
        reduce_scatter(state.world(), output, input, ReduceOp::sum, "test").wait();
        EXPECT_TRUE(at::equal(output, expected));
        const at::Tensor own = input.narrow(0, state.rank() * numel, numel);
        reduce_scatter(state.world(), own, input, ReduceOp::sum, "in place").wait();
        EXPECT_TRUE(at::equal(own, expected));
      }
    });
}

TEST(HostExchange, ReduceScatterOfTheLargestTheSmallestAndOfIntegers) {
  run_ranks(3, [](const ParallelState& state) {
    const auto reduced = [&](const at::Tensor& input, ReduceOp op) {
      const at::Tensor output = at::empty({2}, input.options());
      reduce_scatter(state.world(), output, input, op, "test").wait();
      return output;
    };
    const at::Tensor input = at::arange(6, at::kLong) * (state.rank() + 1);
    const at::Tensor part = at::arange(2, at::kLong) + 2 * state.rank();
    EXPECT_TRUE(at::equal(reduced(input, ReduceOp::sum), part * 6));
    EXPECT_TRUE(at::equal(reduced(input, ReduceOp::max), part * 3));
    EXPECT_TRUE(at::equal(reduced(input.to(at::kInt), ReduceOp::min), part.to(at::kInt)));
    EXPECT_TRUE(at::equal(reduced(input.to(at::kFloat), ReduceOp::max), (part * 3).to(at::kFloat)));
    EXPECT_TRUE(throws_with<UsageError>([&] { reduced(input, ReduceOp::average); },
                                        "reduce_scatter (average) of test over group world [0, 1, "
                                        "2]: found an average of Long"));
  });
}

TEST(HostExchange, AllGatherIntoPlace) {
  for (const int64_t n : {2, 4})
    run_ranks(n, [n](const ParallelState& state) {
      for (const int64_t numel : {0, 1, 1000}) {
        const at::Tensor output = at::zeros({n, numel}, at::kShort);
        const at::Tensor own = output[state.rank()];
        own.fill_(state.rank() + 1);
        all_gather(state.world(), output, own, "test").wait();
        EXPECT_TRUE(
            at::equal(output, at::arange(1, n + 1, at::kShort).unsqueeze(1).expand({n, numel})));
      }
    });
}

TEST(HostExchange, ManyAreUnderWayAtOnce) {
  run_ranks(3, [](const ParallelState& state) {
    std::vector<at::Tensor> tensors;
    std::vector<Work> works;
    for (int i = 0; i < 1000; ++i) {
      tensors.push_back(at::full({i % 50}, i + state.rank(), at::kDouble));
      works.push_back(all_reduce(state.world(), tensors.back(), ReduceOp::sum, "test"));
    }
    for (int i = 0; i < 1000; ++i) {
      works[i].wait();
      EXPECT_TRUE(at::equal(tensors[i], at::full({i % 50}, 3 * i + 3, at::kDouble))) << i;
    }
  });
}

TEST(HostExchange, AReduceScatterSendsItsInputOnceWithoutItsOwnPart) {
  LOCKSTEP_NEEDS_HOST_TRANSPORT();
  constexpr int64_t kRanks = 4, kBytes = 4 * 1000 * kRanks;
  BackendLog log;
  run_ranks(kRanks,
            [](const ParallelState& state) {
              const at::Tensor input = at::ones({1000 * kRanks}), output = at::empty({1000});
              reduce_scatter(state.world(), output, input, ReduceOp::sum, "test").wait();
            },
            {.backend_log = &log});
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    int64_t sent = 0;
    for (const auto& call : log.of_rank(rank)) {
      EXPECT_TRUE(call.operation == "send" || call.operation == "recv") << call.operation;
      if (call.operation == "send" && call.bytes != kGreeting) sent += call.bytes;
    }
    EXPECT_EQ(sent, kBytes * (kRanks - 1) / kRanks);
  }
}

TEST(HostExchange, AllReduceAndAllGatherSendWhatTheyMust) {
  LOCKSTEP_NEEDS_HOST_TRANSPORT();
  constexpr int64_t kRanks = 3, kBytes = 4 * 999;
  BackendLog log;
  run_ranks(
      kRanks,
      [](const ParallelState& state) {
        const at::Tensor whole = at::ones({999});
        all_reduce(state.world(), whole, ReduceOp::sum, "test").wait();
        all_gather(state.world(), whole, whole.narrow(0, 333 * state.rank(), 333), "test").wait();
      },
      {.backend_log = &log});
  int64_t sent = 0;
  for (const auto& call : log.of_rank(1))
    if (call.operation == "send" && call.bytes != kGreeting) sent += call.bytes;
  EXPECT_EQ(sent, 3 * kBytes * (kRanks - 1) / kRanks);  // 2 for the all-reduce, 1 for the gather
}

TEST(HostExchange, WorksThatAreNotWaitedForDoNoHarm) {
  run_ranks(2, [](const ParallelState& state) {
    const at::Tensor tensor = at::ones({100000});
    { const Work dropped = all_reduce(state.world(), tensor, ReduceOp::sum, "test"); }
    const at::Tensor other = at::ones({3});
    all_reduce(state.world(), other, ReduceOp::sum, "test").wait();
    EXPECT_TRUE(at::equal(other, at::full({3}, 2.0F)));
    barrier(state.world(), "test");
  });
}

TEST(HostExchange, EqualNumbersAreTheFactorOne) {
  run_ranks(2, [](const ParallelState& state) {
    // Three times each of these is outside its type.
    for (const at::Tensor& mine : {at::full({5}, 60 - state.rank(), at::kChar),
                                   at::full({5}, 1.5e38 - 1e37 * state.rank(), at::kFloat)})
      for (const ReduceOp op : {ReduceOp::sum, ReduceOp::max}) {
        const at::Tensor plain = mine.clone(), times_one = mine.clone();
        all_reduce(state.world(), plain, op, "plain").wait();
        all_reduce(state.world(), times_one, {op, 3, 3}, "3/3").wait();
        EXPECT_TRUE(at::equal(plain, times_one)) << to_string(op) << " of " << mine.scalar_type();
      }
  });
}

TEST(HostExchange, AFactorIsForSums) {
  run_ranks(2, [](const ParallelState& state) {
    const at::Tensor tensor = at::ones({2});
    EXPECT_TRUE(throws_with<UsageError>(
        [&] {
          (void)all_reduce(state.world(), tensor, {ReduceOp::max, 1, 2}, "test");
        },
        "found the factor 1/2 with max of Float, allowed: 1"));
    EXPECT_TRUE(throws_with<UsageError>(
        [&] {
          (void)all_reduce(state.world(), tensor, {ReduceOp::sum, 0, 0}, "test");
        },
        "found the factor 0/0 with sum of Float, allowed: 1"));
  });
}

}  // namespace
}  // namespace lockstep
