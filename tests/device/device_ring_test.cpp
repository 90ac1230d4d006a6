// Ring attention on the asynchronous device over a backend with NCCL's rules: sending to the next
// rank and receiving from the previous one is one launch, on the ring's communicator.

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <vector>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/models/context_parallel.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/tests/support/device/device_ranks.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep::testing {
namespace {

constexpr int64_t kLength = 24, kHeads = 4, kChannels = 6;

struct RingInput {
  std::vector<at::Tensor> qkv = {}, gradients = {};
  at::Tensor output = {};
};

/// Attention over the whole sequence in one process with libtorch. The loss is the sum of squares.
RingInput whole_sequence() {
  RingInput whole;
  for (int i = 0; i < 3; ++i)
    whole.qkv.push_back(at::sin(at::arange(kLength * kHeads * kChannels, at::kDouble) * 1.3 + i)
                            .view({kLength, 1, kHeads, kChannels}));
  std::vector<at::Tensor> leaves, by_head;
  for (const at::Tensor& x : whole.qkv) leaves.push_back(x.clone().requires_grad_(true));
  for (const at::Tensor& x : leaves) by_head.push_back(x.permute({1, 2, 0, 3}));
  whole.output = at::scaled_dot_product_attention(by_head[0], by_head[1], by_head[2], {}, 0.0,
                                                  /*is_causal=*/true)
                     .permute({2, 0, 1, 3})
                     .flatten(2);
  whole.output.square().sum().backward();
  for (const at::Tensor& leaf : leaves) whole.gradients.push_back(leaf.grad());
  return whole;
}

double apart(const at::Tensor& found, const at::Tensor& expected) {
  return (found.detach().cpu() - expected.detach()).abs().max().item<double>();
}

void attend_as_a_part(const ParallelState& state, const RingInput& whole) {
  const auto context = ContextParallel::of(state, ContextCommunication::p2p);
  const auto part = [&](const at::Tensor& x) {
    return cut_for_context(x.detach(), 0, context.group);
  };
  std::vector<at::Tensor> leaves;
  for (const at::Tensor& x : whole.qkv)
    leaves.push_back(part(x).contiguous().to(state.device()).requires_grad_(true));
  const at::Tensor output = context_attention(leaves[0], leaves[1], leaves[2], context);
  output.square().sum().backward();
  EXPECT_LT(apart(output, part(whole.output)), 1e-12);
  for (size_t i = 0; i < leaves.size(); ++i)
    EXPECT_LT(apart(leaves[i].grad(), part(whole.gradients[i])), 1e-11) << i;
}

/// The calls of one kind, summed over all groups.
NcclCalls calls_of(const NcclCounts& counts, const std::string& kind) {
  NcclCalls sum;
  for (const auto& [group, kinds] : counts.calls)
    if (const auto found = kinds.find(kind); found != kinds.end()) {
      sum.calls += found->second.calls;
      sum.bytes += found->second.bytes;
    }
  return sum;
}

class DeviceRing : public ::testing::TestWithParam<int64_t> {
 protected:
  static void SetUpTestSuite() { use_lagging_device(); }
};

TEST_P(DeviceRing, SendsAndReceivesInOneLaunch) {
  const int64_t ranks = GetParam();
  const RingInput whole = whole_sequence();
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    DeviceRankOptions options;
    options.sizes.context = ranks;
    options.rules = std::make_shared<NcclRules>();
    options.device.seed = seed;
    run_device_ranks(
        ranks, [&](const ParallelState& state) { attend_as_a_part(state, whole); }, options);
    // Keys and values go round the ring in forward and in backward, their gradients once.
    const int64_t steps = 3 * (ranks - 1);
    const int64_t bytes = steps * 2 * (kLength / ranks) * kHeads * kChannels * 8;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const NcclCounts counts = options.rules->counts(rank);
      EXPECT_EQ(counts.kernels, steps) << rank;
      EXPECT_EQ(counts.communicators, 1) << rank;
      for (const char* const kind : {"send", "recv"})
        EXPECT_EQ(calls_of(counts, kind), (NcclCalls{steps, bytes})) << kind << " of " << rank;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, DeviceRing, ::testing::Values(2, 3, 4));

TEST(Exchange, TakesTensorsOfOneShapeAndOtherRanksAlone) {
  run_ranks(2, [](const ParallelState& state) {
    const ProcessGroup group = state.group(GroupKind::dp);
    const int64_t other = 1 - group.rank();
    const at::Tensor two = at::ones({2}), three = at::ones({3});
    EXPECT_TRUE(throws_with<UsageError>(
        [&] { exchange(group, two, other, three, other, "numbers").wait(); },
        "of numbers over group dp [0, 1]: found tensors of 2 and 3, allowed: of one shape"));
    EXPECT_TRUE(throws_with<UsageError>(
        [&] { exchange(group, two, other, at::ones({2}), group.rank(), "numbers").wait(); },
        "found this rank as the peer, allowed: another one"));
    const at::Tensor four = at::ones({4});
    EXPECT_TRUE(throws_with<UsageError>(
        [&] { exchange(group, two, other, two, other, "numbers").wait(); },
        "found memory that is both sent and received, allowed: tensors that do not overlap"));
    EXPECT_TRUE(throws_with<UsageError>(
        [&] {
          exchange(group, four.narrow(0, 0, 3), other, four.narrow(0, 1, 3), other, "it").wait();
        },
        "both sent and received"));
    exchange(group, four.narrow(0, 0, 2), other, four.narrow(0, 2, 2), other, "halves").wait();
  });
}

TEST(Exchange, IsASendAndAReceiveInTheLogOnTheCpuToo) {
  CollectiveLog log;
  run_ranks(3,
            [](const ParallelState& state) {
              const ProcessGroup group = state.group(GroupKind::dp);
              const int64_t rank = group.rank(), next = (rank + 1) % 3, previous = (rank + 2) % 3;
              const at::Tensor got = at::empty({5});
              exchange(group, at::full({5}, static_cast<double>(rank)), next, got, previous,
                       "numbers")
                  .wait();
              EXPECT_TRUE(at::equal(got, at::full({5}, static_cast<double>(previous))));
            },
            {.log = &log});
  for (int64_t rank = 0; rank < 3; ++rank) {
    const auto records = log.of_rank(rank);
    ASSERT_EQ(records.size(), 2U);
    EXPECT_EQ(records[0].operation, "send (to " + std::to_string((rank + 1) % 3) + ")");
    EXPECT_EQ(records[1].operation, "receive (from " + std::to_string((rank + 2) % 3) + ")");
    for (const auto& record : records) EXPECT_EQ(record.bytes, 20);
  }
}

}  // namespace
}  // namespace lockstep::testing
