#include "lockstep/models/context_parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <limits>

#include <ATen/ATen.h>

#include "lockstep/tests/support/memory_counter.h"
#include "lockstep/tests/support/rank_threads.h"

// Attention over ranks that hold parts of the sequence, compared with plain attention over it all.

namespace lockstep {
namespace {

using testing::CollectiveLog;
using testing::run_ranks;

struct Problem {
  int64_t length = 48, batch = 2, heads = 8, groups = 4, channels = 6;
  bool causal = true;
  std::vector<int64_t> documents = {};
  std::optional<int64_t> window = {};
  std::shared_ptr<const SequenceDocuments> bounds = {};  ///< for each sequence

  const std::vector<int64_t>& documents_of(int64_t sequence) const {
    return bounds ? bounds->at(static_cast<size_t>(sequence)) : documents;
  }
};

at::Tensor numbers(std::vector<int64_t> shape, double seed) {
  const int64_t numel = c10::multiply_integers(shape);
  return at::sin(at::arange(numel, at::kDouble) * 1.3 + seed).view(shape) * 1.5;
}

/// Queries, keys, values and loss weights; output and gradients of plain attention.
struct Whole {
  std::vector<at::Tensor> inputs, gradients;
  at::Tensor weight, output;

  explicit Whole(const Problem& problem) {
    const auto shape = [&](int64_t heads) {
      return std::vector<int64_t>{problem.length, problem.batch, heads, problem.channels};
    };
    inputs = {numbers(shape(problem.heads), 0.1), numbers(shape(problem.groups), 2.2),
              numbers(shape(problem.groups), 4.5)};
    weight = numbers({problem.length, problem.batch, problem.heads * problem.channels}, 7.0);
    std::vector<at::Tensor> leaves;
    for (const at::Tensor& input : inputs) leaves.push_back(input.clone().requires_grad_(true));
    output = plain(leaves, problem);
    (output * weight).sum().backward();
    for (const at::Tensor& leaf : leaves) gradients.push_back(leaf.grad());
    output = output.detach();
  }

  static at::Tensor mask(const Problem& problem) {
    const at::Tensor position = at::arange(problem.length);
    std::vector<at::Tensor> masks;
    for (int64_t sequence = 0; sequence < problem.batch; ++sequence) {
      at::Tensor document = at::zeros({problem.length}, at::kLong);
      int64_t end = 0;
      for (const int64_t length : problem.documents_of(sequence))
        document += at::ge(position, end += length).to(at::kLong);
      masks.push_back(document.unsqueeze(1) == document.unsqueeze(0));
    }
    at::Tensor seen = at::stack(masks).unsqueeze(1);
    if (problem.window) seen = seen.triu(1 - *problem.window);
    return problem.causal ? seen.tril() : seen;
  }

  static at::Tensor plain(const std::vector<at::Tensor>& qkv, const Problem& problem) {
    const int64_t repeats = problem.heads / problem.groups;
    const auto wide = [&](const at::Tensor& x) { return x.repeat_interleave(repeats, 2); };
    const at::Tensor scores = at::einsum("qbhc,kbhc->bhqk", {qkv[0], wide(qkv[1])}) /
                              std::sqrt(static_cast<double>(problem.channels));
    const at::Tensor weights =
        scores.masked_fill(~mask(problem), -std::numeric_limits<double>::infinity()).softmax(-1);
    return at::einsum("bhqk,kbhc->qbhc", {weights, wide(qkv[2])}).flatten(2);
  }
};

double distance(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>();
}

/// One rank's forward and backward, compared with its part of the whole.
void expect_part_of(const Whole& whole, const Problem& problem, const ContextParallel& context,
                    at::ScalarType dtype, double tolerance) {
  const auto part = [&](const at::Tensor& x) {
    return cut_for_context(x, 0, context.group, problem.documents);
  };
  std::vector<at::Tensor> leaves;
  for (const at::Tensor& input : whole.inputs)
    leaves.push_back(part(input).to(dtype).clone().requires_grad_(true));
  const at::Tensor output = context_attention(leaves[0], leaves[1], leaves[2], context,
                                              {.causal = problem.causal,
                                               .window = problem.window,
                                               .documents = problem.documents,
                                               .bounds = problem.bounds});
  ASSERT_EQ(output.sizes(), part(whole.output).sizes());
  EXPECT_EQ(output.scalar_type(), dtype);
  EXPECT_LT(distance(output.detach(), part(whole.output)), tolerance);
  (output * part(whole.weight).to(dtype)).sum().backward();
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(leaves[i].grad().scalar_type(), dtype);
    EXPECT_LT(distance(leaves[i].grad(), part(whole.gradients[i])), 4 * tolerance) << "input " << i;
  }
}

void expect_equal_to_one_rank(int64_t ranks, ContextCommunication communication,
                              const Problem& problem, at::ScalarType dtype = at::kDouble,
                              std::vector<int64_t> levels = {}, CollectiveLog* log = nullptr) {
  SCOPED_TRACE(std::to_string(ranks) + " ranks, " + to_string(communication) +
               (problem.causal ? ", causal" : ", full"));
  const Whole whole(problem);
  const double tolerance = dtype == at::kDouble ? 1e-12 : dtype == at::kFloat ? 1e-5 : 4e-2;
  run_ranks(ranks,
            [&](const ParallelState& state) {
              expect_part_of(whole, problem, ContextParallel::of(state, communication), dtype,
                             tolerance);
            },
            {.sizes = {.context = ranks, .hierarchical_context = std::move(levels)}, .log = log});
}

constexpr auto kRing = ContextCommunication::p2p;
constexpr auto kGather = ContextCommunication::all_gather;
constexpr auto kHeads = ContextCommunication::a2a;
constexpr auto kBoth = ContextCommunication::a2a_p2p;

TEST(ContextParallel, EqualsOneRankInDouble) {
  for (const auto communication : {kRing, kGather, kHeads})
    for (const int64_t ranks : {1, 2, 4, 8})
      for (const int64_t groups : {8, 16})
        for (const bool causal : {true, false})
          expect_equal_to_one_rank(
              ranks, communication,
              {.heads = 16, .groups = groups, .channels = 4, .causal = causal});
}

TEST(ContextParallel, RingAndGatherTakeAnyNumberOfHeadsAndRanks) {
  for (const auto communication : {kRing, kGather})
    for (const int64_t ranks : {3, 4})
      for (const int64_t groups : {1, 3})
        expect_equal_to_one_rank(ranks, communication, {.heads = 3, .groups = groups});
}

TEST(ContextParallel, AWindowHidesTheSameTokensHoweverTheSequenceIsCut) {
  for (const int64_t window : {1, 2, 5, 13, 20, 47, 48})
    for (const auto communication : {kRing, kGather, kHeads})
      for (const int64_t ranks : {1, 2, 4})
        expect_equal_to_one_rank(ranks, communication, {.window = window});
  for (const int64_t window : {3, 9, 17}) {
    const Problem packed{.documents = {16, 8, 24}, .window = window};
    for (const auto communication : {kRing, kGather, kHeads})
      expect_equal_to_one_rank(4, communication, packed);
    expect_equal_to_one_rank(4, kBoth, packed, at::kDouble, {2, 2});
    expect_equal_to_one_rank(2, kRing, {.window = window}, at::kFloat);
    expect_equal_to_one_rank(2, kRing, {.window = window}, at::kBFloat16);
  }
}

TEST(ContextParallel, HeadsInsideAndARingAcross) {
  for (const bool causal : {true, false}) {
    const Problem problem{.causal = causal};
    expect_equal_to_one_rank(4, kBoth, problem, at::kDouble, {2, 2});
    expect_equal_to_one_rank(8, kBoth, problem, at::kDouble, {2, 4});
    expect_equal_to_one_rank(8, kBoth, problem, at::kDouble, {4, 2});
    expect_equal_to_one_rank(2, kBoth, problem, at::kDouble, {1, 2});
  }
}

TEST(ContextParallel, PackedDocumentsDoNotSeeEachOther) {
  for (const bool causal : {true, false}) {
    const Problem problem{.causal = causal, .documents = {16, 8, 24}};
    for (const auto communication : {kRing, kGather, kHeads})
      for (const int64_t ranks : {1, 2, 4}) expect_equal_to_one_rank(ranks, communication, problem);
    expect_equal_to_one_rank(4, kBoth, problem, at::kDouble, {2, 2});
  }
}

TEST(ContextParallel, DocumentsOfAnyLengthsDoNotSeeEachOther) {
  const auto bounds = std::make_shared<const SequenceDocuments>(
      SequenceDocuments{{5, 1, 30, 12}, {48}, {47, 1}, {20, 28}});
  for (const std::optional<int64_t> window : {std::optional<int64_t>{}, {4}, {11}}) {
    const Problem problem{.batch = 4, .window = window, .bounds = bounds};
    for (const auto communication : {kRing, kGather, kHeads})
      for (const int64_t ranks : {1, 2, 4}) expect_equal_to_one_rank(ranks, communication, problem);
    for (const auto communication : {kRing, kGather})
      expect_equal_to_one_rank(3, communication, problem);
    expect_equal_to_one_rank(4, kBoth, problem, at::kDouble, {2, 2});
    expect_equal_to_one_rank(2, kRing, problem, at::kBFloat16);
  }
}

TEST(ContextParallel, DocumentsSendWhatWholeSequencesSend) {
  const auto bounds =
      std::make_shared<const SequenceDocuments>(SequenceDocuments{{5, 43}, {20, 8, 20}});
  for (const auto communication : {kRing, kGather, kHeads}) {
    CollectiveLog whole, bounded;
    expect_equal_to_one_rank(2, communication, {}, at::kDouble, {}, &whole);
    expect_equal_to_one_rank(2, communication, {.bounds = bounds}, at::kDouble, {}, &bounded);
    for (const int64_t rank : {0, 1}) {
      EXPECT_EQ(bounded.of_rank(rank), whole.of_rank(rank));
      EXPECT_FALSE(whole.of_rank(rank).empty());
    }
  }
}

TEST(ContextParallel, OddLengthsAfterPadding) {
  // The causal mask hides the padding after the sequence from the tokens before it.
  const int64_t length = padded_for_context(41, 4);
  EXPECT_EQ(length, 48);
  EXPECT_LT(
      distance(Whole({.length = length}).output.narrow(0, 0, 41), Whole({.length = 41}).output),
      1e-14);
  for (const auto communication : {kRing, kGather, kHeads})
    expect_equal_to_one_rank(4, communication, {.length = length});
}

TEST(ContextParallel, SinglePrecisionAndBf16) {
  for (const auto communication : {kRing, kGather, kHeads})
    for (const int64_t ranks : {2, 4}) {
      expect_equal_to_one_rank(ranks, communication, {}, at::kFloat);
      expect_equal_to_one_rank(ranks, communication, {}, at::kBFloat16);
    }
}

/// "operation of label: bytes" -> number of calls on rank 1.
std::map<std::string, int64_t> calls(const CollectiveLog& log) {
  std::map<std::string, int64_t> result;
  for (const CollectiveRecord& call : log.of_rank(1))
    ++result[call.operation + " of " + call.label + ": " + std::to_string(call.bytes)];
  return result;
}

using Calls = std::map<std::string, int64_t>;

TEST(ContextParallel, TheRingMovesEachBlockOnce) {
  for (const int64_t ranks : {2, 4, 8}) {
    const Problem problem;
    CollectiveLog log;
    expect_equal_to_one_rank(ranks, kRing, problem, at::kDouble, {}, &log);
    const int64_t bytes =
        2 * problem.length / ranks * problem.batch * problem.groups * problem.channels * 8;
    const std::string next = std::to_string(2 % ranks), size = ": " + std::to_string(bytes);
    const int64_t once = ranks - 1;
    EXPECT_EQ(calls(log),
              (Calls{{"send (to " + next + ") of keys and values" + size, 2 * once},
                     {"receive (from 0) of keys and values" + size, 2 * once},
                     {"send (to " + next + ") of gradient of keys and values" + size, once},
                     {"receive (from 0) of gradient of keys and values" + size, once}}));
  }
}

TEST(ContextParallel, GatherAndExchangeCommunicateOnceADirection) {
  const Problem problem;
  const int64_t token = problem.batch * problem.channels * 8, part = problem.length / 4;
  CollectiveLog gather, exchange;
  expect_equal_to_one_rank(4, kGather, problem, at::kDouble, {}, &gather);
  const std::string keys = std::to_string(2 * part * problem.groups * token);
  const std::string all = std::to_string(2 * problem.length * problem.groups * token);
  EXPECT_EQ(calls(gather),
            (Calls{{"all_gather of keys and values: " + keys, 1},
                   {"reduce_scatter (sum) of gradient of keys and values: " + all, 1}}));
  expect_equal_to_one_rank(4, kHeads, problem, at::kDouble, {}, &exchange);
  const std::string in = std::to_string(part * (problem.heads + 2 * problem.groups) * token);
  const std::string out = std::to_string(part * problem.heads * token);
  EXPECT_EQ(calls(exchange),
            (Calls{{"all_to_all of queries, keys and values: " + in, 1},
                   {"all_to_all of attention output: " + out, 1},
                   {"all_to_all of gradient of attention output: " + out, 1},
                   {"all_to_all of gradient of queries, keys and values: " + in, 1}}));
}

/// Peak bytes of a rank during forward and backward of attention over `part` tokens per rank,
/// without its queries, keys and values, relative to the bytes of these.
double held_at_most(int64_t ranks, ContextCommunication communication, int64_t part) {
  std::atomic<int64_t> peak = 0;
  const std::vector<int64_t> shape = {part, 1, 1, 64};
  run_ranks(ranks,
            [&](const ParallelState& state) {
              const auto context = ContextParallel::of(state, communication);
              std::vector<at::Tensor> qkv;
              for (int i = 0; i < 3; ++i) qkv.push_back(at::ones(shape).requires_grad_(true));
              const testing::MemoryCounter counter;
              context_attention(qkv[0], qkv[1], qkv[2], context).sum().backward();
              if (state.rank() == 0) peak = counter.peak();
            },
            {.sizes = {.context = ranks}});
  return static_cast<double>(peak) / static_cast<double>(3 * part * 64 * 4);
}

TEST(ContextParallel, MemoryOfTheRingGrowsWithThePartOfTheSequence) {
  const double ring = held_at_most(4, kRing, 256);
  EXPECT_LT(ring, 7.5);
  EXPECT_NEAR(held_at_most(8, kRing, 256), ring, 0.01 * ring);  // twice the sequence
  EXPECT_NEAR(held_at_most(4, kRing, 512), ring, 0.06 * ring);  // twice as much in bytes
  const double gathered = held_at_most(4, kGather, 256);
  EXPECT_GT(held_at_most(8, kGather, 256), 1.7 * gathered);
}

TEST(ContextParallel, PartsJoinInTheOrderOfTheSequence) {
  run_ranks(4,
            [](const ParallelState& state) {
              const ProcessGroup group = state.group(GroupKind::cp);
              const std::vector<int64_t> documents = {8, 16};
              const at::Tensor x = at::arange(24);
              EXPECT_TRUE(at::equal(cut_for_context(x.view({1, 24}), 1, group, documents)[0],
                                    cut_for_context(x, 0, group, documents)));
              std::vector<at::Tensor> parts(4);
              for (int64_t rank = 0; rank < 4; ++rank)
                parts[static_cast<size_t>(rank)] =
                    at::cat({x.narrow(0, rank, 1), x.narrow(0, 7 - rank, 1),
                             x.narrow(0, 8 + 2 * rank, 2), x.narrow(0, 8 + 14 - 2 * rank, 2)});
              EXPECT_TRUE(at::equal(cut_for_context(x, 0, group, documents),
                                    parts[static_cast<size_t>(group.rank())]));
              EXPECT_TRUE(at::equal(to_sequence_order(at::cat(parts), 4, documents), x));
            },
            {.sizes = {.context = 4}});
}

}  // namespace
}  // namespace lockstep
