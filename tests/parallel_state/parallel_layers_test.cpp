#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "lockstep/parallel_state/parallel_functions.h"
#include "lockstep/tests/support/allocation_counter.h"
#include "lockstep/tests/support/rank_threads.h"

// Layers cut over ranks, built from the differentiable collectives, compared with the same whole
// layers in one process.

namespace lockstep {
namespace {

using testing::allocations;
using testing::CollectiveLog;
using testing::run_ranks;

constexpr int64_t kSequence = 12, kBatch = 2, kHidden = 12, kInner = 24;

at::Tensor numbers(std::vector<int64_t> shape, double seed) {
  const int64_t numel = c10::multiply_integers(shape);
  return at::sin(at::arange(numel, at::kDouble) * 0.7 + seed).view(shape);
}

/// A leaf with the values of `whole`, or of this rank's chunk of it.
at::Tensor leaf(const at::Tensor& whole) { return whole.detach().clone().requires_grad_(true); }
at::Tensor leaf(const at::Tensor& whole, int64_t dim, const ProcessGroup& group) {
  return leaf(whole.chunk(group.size(), dim)[static_cast<size_t>(group.rank())]);
}

void expect_chunk(const at::Tensor& chunk, const at::Tensor& whole, int64_t dim,
                  const ProcessGroup& group) {
  EXPECT_TRUE(at::allclose(chunk, whole.chunk(group.size(), dim)[static_cast<size_t>(group.rank())],
                           1e-12, 1e-12));
}

/// Two linear layers with tanh between them, in one process.
struct Mlp {
  at::Tensor input = leaf(numbers({kSequence, kBatch, kHidden}, 0));
  at::Tensor first = leaf(numbers({kInner, kHidden}, 1));
  at::Tensor bias = leaf(numbers({kInner}, 2));
  at::Tensor second = leaf(numbers({kHidden, kInner}, 3));
  at::Tensor weight_of_loss = numbers({kSequence, kBatch, kHidden}, 4);
  at::Tensor output;

  Mlp() {
    output = at::linear(at::tanh(at::linear(input, first, bias)), second);
    (output.tanh() * weight_of_loss).sum().backward();
  }
};

/// This rank's columns of the first layer and rows of the second.
struct MlpPart {
  at::Tensor first, bias, second;
  MlpPart(const Mlp& whole, const ProcessGroup& group)
      : first(leaf(whole.first, 0, group)),
        bias(leaf(whole.bias, 0, group)),
        second(leaf(whole.second, 1, group)) {}

  at::Tensor forward(const at::Tensor& input) const {
    return at::linear(at::tanh(at::linear(input, first, bias)), second);
  }

  void expect_gradients_of(const Mlp& whole, const ProcessGroup& group) const {
    expect_chunk(first.grad(), whole.first.grad(), 0, group);
    expect_chunk(bias.grad(), whole.bias.grad(), 0, group);
    expect_chunk(second.grad(), whole.second.grad(), 1, group);
  }
};

std::vector<std::pair<std::string, int64_t>> sent(const CollectiveLog& log) {
  std::vector<std::pair<std::string, int64_t>> result;
  for (const CollectiveRecord& call : log.of_rank(0))
    result.emplace_back(call.operation + " of " + call.label, call.bytes);
  return result;
}

constexpr int64_t kBytes = kSequence * kBatch * kHidden * 8;
using Sent = std::vector<std::pair<std::string, int64_t>>;

TEST(ParallelLayers, ColumnThenRowParallel) {
  const Mlp whole;
  for (const int64_t n : {1, 2, 3, 4}) {
    CollectiveLog log;
    run_ranks(n,
              [&whole](const ParallelState& state) {
                const ProcessGroup group = state.world();
                const MlpPart part(whole, group);
                const at::Tensor input = leaf(whole.input);
                const at::Tensor output = reduce_from_group(
                    part.forward(copy_to_group(input, group, "input")), group, "output");
                EXPECT_TRUE(at::allclose(output, whole.output, 1e-12, 1e-12));
                (output.tanh() * whole.weight_of_loss).sum().backward();
                EXPECT_TRUE(at::allclose(input.grad(), whole.input.grad(), 1e-12, 1e-12));
                part.expect_gradients_of(whole, group);
              },
              {.log = &log});
    EXPECT_EQ(sent(log), n == 1 ? Sent{}
                                : (Sent{{"all_reduce (sum) of output", kBytes},
                                        {"all_reduce (sum) of gradient of input", kBytes}}));
  }
}

TEST(ParallelLayers, ColumnThenRowParallelWithSequenceParallelism) {
  const Mlp whole;
  for (const int64_t n : {1, 2, 3, 4}) {
    CollectiveLog log;
    run_ranks(n,
              [&whole](const ParallelState& state) {
                const ProcessGroup group = state.world();
                const MlpPart part(whole, group);
                const at::Tensor input = leaf(whole.input, 0, group);
                const at::Tensor gathered =
                    gather_from_group(input, group, 0, GradientState::partial_sum, "input");
                const at::Tensor output =
                    reduce_scatter_to_group(part.forward(gathered), group, 0, "output");
                expect_chunk(output, whole.output, 0, group);
                (output.tanh() * leaf(whole.weight_of_loss, 0, group).detach()).sum().backward();
                expect_chunk(input.grad(), whole.input.grad(), 0, group);
                part.expect_gradients_of(whole, group);
              },
              {.log = &log});
    EXPECT_EQ(sent(log), n == 1 ? Sent{}
                                : (Sent{{"all_gather of input", kBytes / n},
                                        {"reduce_scatter (sum) of output", kBytes},
                                        {"all_gather of gradient of output", kBytes / n},
                                        {"reduce_scatter (sum) of gradient of input", kBytes}}));
  }
}

TEST(ParallelLayers, IntoTheSequenceParallelRegionAndOutAgain) {
  const Mlp whole;
  for (const int64_t n : {2, 3, 4})
    run_ranks(n, [&whole](const ParallelState& state) {
      // An embedding that is equal on all ranks is cut; the loss is equal on all ranks.
      const ProcessGroup group = state.world();
      const at::Tensor input = leaf(whole.input);
      const at::Tensor cut = scatter_to_group(input, group, 0, "embedding").tanh();
      const at::Tensor again = gather_from_group(cut, group, 0, GradientState::complete, "logits");
      (again * whole.weight_of_loss).sum().backward();
      const at::Tensor same = leaf(whole.input);
      (same.tanh() * whole.weight_of_loss).sum().backward();
      EXPECT_TRUE(at::equal(again.detach(), same.detach().tanh()));
      EXPECT_TRUE(at::allclose(input.grad(), same.grad(), 1e-12, 1e-12));
    });
}

TEST(ParallelLayers, MixingAlongTheSequenceBetweenTwoAllToAlls) {
  const at::Tensor weights = numbers({kSequence, kBatch, kHidden}, 4);
  const at::Tensor whole = leaf(numbers({kSequence, kBatch, kHidden}, 5));
  const at::Tensor mixed = at::softmax(whole, 0) * whole.cumsum(0);
  (mixed * weights).sum().backward();
  for (const int64_t n : {1, 2, 3, 4}) {
    CollectiveLog log;
    run_ranks(n,
              [&](const ParallelState& state) {
                const ProcessGroup group = state.world();
                const at::Tensor x = leaf(whole, 0, group);
                const at::Tensor columns = all_to_all_dims(x, group, 2, 0, "to columns");
                const at::Tensor result = all_to_all_dims(
                    at::softmax(columns, 0) * columns.cumsum(0), group, 0, 2, "to rows");
                expect_chunk(result, mixed, 0, group);
                (result * leaf(weights, 0, group).detach()).sum().backward();
                expect_chunk(x.grad(), whole.grad(), 0, group);
              },
              {.log = &log});
    EXPECT_EQ(sent(log), n == 1 ? Sent{}
                                : (Sent{{"all_to_all of to columns", kBytes / n},
                                        {"all_to_all of to rows", kBytes / n},
                                        {"all_to_all of gradient of to rows", kBytes / n},
                                        {"all_to_all of gradient of to columns", kBytes / n}}));
  }
}

TEST(ParallelLayers, RowsGoToTheirExpertsAndBack) {
  // Rank r holds 3 + r rows. Row i goes to rank i % n, whose expert multiplies it by its weight.
  for (const int64_t n : {1, 2, 3, 4})
    run_ranks(n, [n](const ParallelState& state) {
      const auto rows_to = [n](int64_t rank, int64_t expert) {
        return (3 + rank + n - 1 - expert) / n;
      };
      std::vector<int64_t> sent_rows, received_rows;
      at::Tensor expected = at::zeros({}, at::kDouble);
      for (int64_t peer = 0; peer < n; ++peer) {
        sent_rows.push_back(rows_to(state.rank(), peer));
        received_rows.push_back(rows_to(peer, state.rank()));
        const at::Tensor rows = numbers({3 + peer, 2}, static_cast<double>(peer));
        expected += rows.slice(0, state.rank(), c10::nullopt, n).sum();
      }
      const at::Tensor x = leaf(numbers({3 + state.rank(), 2}, static_cast<double>(state.rank())));
      std::vector<int64_t> order;
      for (int64_t expert = 0; expert < n; ++expert)
        for (int64_t i = expert; i < x.size(0); i += n) order.push_back(i);
      const at::Tensor index = at::tensor(order, at::kLong);
      const at::Tensor weight = at::full({}, state.rank() + 2.0, at::kDouble).requires_grad_(true);
      const at::Tensor dispatched = all_to_all_rows(x.index_select(0, index), state.world(),
                                                    received_rows, sent_rows, "dispatch");
      const at::Tensor combined =
          all_to_all_rows(dispatched * weight, state.world(), sent_rows, received_rows, "combine");
      combined.sum().backward();
      const at::Tensor factor = index.remainder(n).add(2).to(at::kDouble).unsqueeze(1);
      EXPECT_TRUE(at::equal(combined, x.index_select(0, index) * factor));
      EXPECT_TRUE(at::equal(x.grad().index_select(0, index), factor.expand({x.size(0), 2})));
      EXPECT_NEAR(weight.grad().item<double>(), expected.item<double>(), 1e-12);
    });
}

TEST(ParallelLayers, GoldenCasesOfMegatronCore) {
  run_ranks(8,
            [](const ParallelState& state) {
              const at::Tensor x = at::full({1}, static_cast<double>(state.rank()), at::kDouble);
              const at::Tensor sum = reduce_from_group(x, state.group(GroupKind::tp), "rank");
              EXPECT_EQ(sum.item<double>(), state.rank() < 4 ? 6 : 22);
              const at::Tensor rows = at::arange(4, at::kDouble).view({4, 1});
              const at::Tensor row =
                  reduce_scatter_to_group(rows, state.group(GroupKind::tp), 0, "rows");
              EXPECT_EQ(row.item<double>(), 4 * (state.rank() % 4));
            },
            {.sizes = {.tensor = 4, .pipeline = 2}});
}

/// Runs forward and backward of each function.
void differentiate_each(const ProcessGroup& group, const std::string& label) {
  const at::Tensor x = leaf(numbers({4, 4}, 0));
  const std::vector<int64_t> two_each = {2, 2};
  copy_to_group(x, group, label).sum().backward();
  reduce_from_group(x, group, label).sum().backward();
  scatter_to_group(x, group, 0, label).sum().backward();
  gather_from_group(x, group, 1, GradientState::partial_sum, label).sum().backward();
  reduce_scatter_to_group(x, group, 0, label).sum().backward();
  all_to_all_rows(x, group, two_each, two_each, label).sum().backward();
  all_to_all_dims(x, group, 0, 1, label).sum().backward();
}

TEST(ParallelFunctions, ALabelAndThatOfItsGradientAreMadeOnceAGroup) {
  run_ranks(2, [](const ParallelState& state) {
    const std::string label(testing::kLongText, 'x');
    allocations = {};
    differentiate_each(state.world(), label);
    EXPECT_EQ(allocations.long_texts, 2);
    for (int i = 0; i < 3; ++i) differentiate_each(state.world(), label);
    EXPECT_EQ(allocations.long_texts, 2);
  });
}

}  // namespace
}  // namespace lockstep
