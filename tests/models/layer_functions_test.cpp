#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "lockstep/core/error.h"
#include "lockstep/core/philox.h"
#include "lockstep/models/activation.h"
#include "lockstep/models/cross_entropy.h"
#include "lockstep/models/dropout.h"
#include "lockstep/models/embedding.h"
#include "lockstep/models/linear_function.h"
#include "lockstep/models/random_seeds.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/parallel_state/parallel_functions.h"
#include "lockstep/tests/support/allocation_counter.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/throws_with.h"

// The functions below the layers, on their own: compared with central differences, PyTorch and
// known numbers.

namespace lockstep {
namespace {

using testing::run_ranks;
using testing::throws_with;

at::Tensor numbers(const std::vector<int64_t>& shape, double seed) {
  const int64_t numel = c10::multiply_integers(shape);
  return at::sin(at::arange(numel, at::kDouble) * 0.7 + seed).view(shape);
}

at::Tensor ids(std::vector<int64_t> values) { return at::tensor(values, at::kLong); }

double sum_over(const ProcessGroup& group, const at::Tensor& value) {
  const at::Tensor sum = value.detach().clone();
  all_reduce(group, sum, ReduceOp::sum, "sum").wait();
  return sum.item<double>();
}

/// An input of a function. Either all ranks hold the same one, or each has its own.
struct Input {
  at::Tensor value;
  bool replicated = false;
};

using LocalLoss = std::function<at::Tensor(const std::vector<Input>&)>;

/// Compares the gradients of the loss, which is the sum of the ranks' `loss` values, with central
/// differences.
void expect_gradients(std::vector<Input> inputs, const ProcessGroup& group, const LocalLoss& loss) {
  constexpr double kStep = 1e-5;
  for (Input& input : inputs) input.value = input.value.detach().clone().requires_grad_(true);
  loss(inputs).backward();
  const at::NoGradGuard no_grad;
  for (const Input& input : inputs)
    for (int64_t owner = 0; owner < (input.replicated ? 1 : group.size()); ++owner) {
      const bool mine = input.replicated || owner == group.rank();
      const at::Tensor flat = input.value.detach().view({-1});
      for (int64_t i = 0; i < flat.numel(); ++i) {
        const double before = flat[i].item<double>();
        const auto loss_at = [&](double value) {
          if (mine) flat[i].fill_(value);
          return sum_over(group, loss(inputs));
        };
        const double slope = (loss_at(before + kStep) - loss_at(before - kStep)) / (2 * kStep);
        if (!mine) continue;
        flat[i].fill_(before);
        EXPECT_NEAR(input.value.grad().view({-1})[i].item<double>(), slope,
                    1e-7 * (1 + std::abs(slope)));
      }
    }
}

TEST(ParallelLinear, GradientsEqualCentralDifferences) {
  std::mt19937 random(1);
  const auto size = [&](int64_t most) { return 1 + static_cast<int64_t>(random()) % most; };
  for (int shape = 0; shape < 20; ++shape) {
    const int64_t n = 1 + shape % 3, sequence = n * size(2), batch = size(2), in = size(3);
    const int64_t out = size(3);
    for (const auto kind : {LinearInput::own, LinearInput::copied, LinearInput::sequence_chunk})
      run_ranks(n, [&](const ParallelState& state) {
        const ProcessGroup group = state.world();
        const auto rank = static_cast<double>(group.rank());
        const bool copied = kind == LinearInput::copied;
        const int64_t own = kind == LinearInput::sequence_chunk ? sequence / n : sequence;
        expect_gradients({{numbers({own, batch, in}, copied ? 0 : rank), copied},
                          {numbers({2, out, in}, 1 + rank)},
                          {numbers({2, out}, 2 + rank)}},
                         group, [&](const std::vector<Input>& x) {
                           const at::Tensor y =
                               parallel_linear(x[0].value, x[1].value, x[2].value,
                                               {.group = group, .input = kind, .label = "layer"});
                           return (y.tanh() * numbers(y.sizes().vec(), 3 + rank)).sum();
                         });
      });
  }
}

TEST(CrossEntropy, GradientsEqualCentralDifferences) {
  std::mt19937 random(2);
  for (int shape = 0; shape < 20; ++shape) {
    const int64_t n = 1 + shape % 3, vocabulary = 2 + static_cast<int64_t>(random()) % 6;
    const int64_t tokens = 1 + static_cast<int64_t>(random()) % 4;
    const int64_t rows = (vocabulary + n - 1) / n * n + (shape % 2) * n;
    const double smoothing = shape % 4 < 2 ? 0 : 0.1;
    run_ranks(n, [&](const ParallelState& state) {
      const ProcessGroup group = state.world();
      at::Tensor labels = (at::arange(tokens) * 5 + shape).remainder(vocabulary);
      if (tokens > 2) labels[1] = kIgnoredLabel;
      const VocabPartition part = vocab_partition(vocabulary, rows, group.rank(), n);
      const at::Tensor logits = numbers({tokens, part.rows}, static_cast<double>(group.rank())) * 3;
      // Every rank returns the whole loss, so each is 1/n of the sum over the ranks.
      expect_gradients({{logits}}, group, [&](const std::vector<Input>& x) {
        const at::Tensor loss =
            (vocab_parallel_cross_entropy(x[0].value, labels, part, group, smoothing) *
             numbers({tokens}, 1))
                .sum();
        return at::GradMode::is_enabled() ? loss : loss / static_cast<double>(n);
      });
    });
  }
}

TEST(ParallelLinear, RefusesSecondDerivativesAndSendsOnlyWhatIsNeeded) {
  testing::CollectiveLog log;
  run_ranks(2, [&](const ParallelState& state) {
    const at::Tensor x = numbers({2, 1, 3}, 0).requires_grad_(true);
    const at::Tensor w = numbers({2, 3}, 1).requires_grad_(true);
    const at::Tensor y =
        parallel_linear(x, w, {}, {.group = state.world(), .label = "decoder.linear"});
    EXPECT_TRUE(throws_with<UsageError>(
        [&] {
          torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true);
        },
        "decoder.linear: found backward with create_graph"));
    const at::Tensor losses =
        vocab_parallel_cross_entropy(numbers({2, 2}, 1).requires_grad_(true), ids({0, 3}),
                                     vocab_partition(4, 4, state.rank(), 2), state.world());
    EXPECT_TRUE(throws_with<UsageError>(
        [&] { torch::autograd::backward({losses.sum()}, {}, true, /*create_graph=*/true); },
        "vocab_parallel_cross_entropy: found backward with create_graph"));
  });
  run_ranks(2,
            [](const ParallelState& state) {  // a frozen weight: no second gather of the input
              const at::Tensor x = numbers({2, 1, 3}, 0).requires_grad_(true);
              parallel_linear(x, numbers({2, 3}, 1), {},
                              {.group = state.world(), .input = LinearInput::sequence_chunk})
                  .sum()
                  .backward();
            },
            {.log = &log});
  EXPECT_EQ(log.of_rank(0).size(), 2u);
}

TEST(ParallelLinear, NoTextWithItsLabelIsMadeInAStep) {
  run_ranks(2, [](const ParallelState& state) {
    for (const LinearInput input : {LinearInput::copied, LinearInput::sequence_chunk}) {
      const ParallelLinearOptions options = {
          .group = state.world(), .input = input, .label = std::string(testing::kLongText, 'n')};
      const at::Tensor w = numbers({4, 3}, 1).requires_grad_(true);
      for (int step = 0; step < 3; ++step) {
        testing::allocations = {};
        const at::Tensor x = numbers({2, 2, 3}, step).requires_grad_(true);
        parallel_linear(x, w, {}, options).sum().backward();
        if (step > 0) {
          EXPECT_EQ(testing::allocations.long_texts, 0) << "step " << step;
        }
      }
    }
  });
}

TEST(ParallelLinear, G78AFrozenWeightAndTheRowsOfAVocabulary) {
  run_ranks(8, [](const ParallelState& state) {
    const at::Tensor x = at::ones({8, 8}, at::kDouble).requires_grad_(true);
    const at::Tensor y = parallel_linear(x, at::eye(8, at::kDouble), {},
                                         {.group = state.world(), .input = LinearInput::copied});
    EXPECT_TRUE(at::equal(y, at::ones({8, 8}, at::kDouble)));
    y.sum().backward();
    EXPECT_TRUE(at::equal(x.grad(), at::full({8, 8}, 8.0, at::kDouble)));
  });
  EXPECT_EQ(vocab_partition(1600, 1600, 3, 8),
            (VocabPartition{.vocab_size = 1600, .rows = 200, .first = 600, .held = 200}));
  EXPECT_EQ(vocab_partition(11, 16, 2, 4), (VocabPartition{11, 4, 8, 3}));
  EXPECT_EQ(vocab_partition(11, 16, 3, 4), (VocabPartition{11, 4, 12, 0}));
}

TEST(Mappings, G74AndG77ReduceOverTheTensorParallelRanks) {
  testing::RankThreadOptions options;
  options.sizes.tensor = 4;
  options.sizes.pipeline = 2;
  run_ranks(
      8,
      [](const ParallelState& state) {
        const auto rank = static_cast<double>(state.rank());
        const ProcessGroup tp = state.group(GroupKind::tp);
        const at::Tensor sum = reduce_from_group(at::full({1}, rank, at::kDouble), tp, "rank");
        EXPECT_EQ(sum.item<double>(), state.rank() < 4 ? 6 : 22);
        const at::Tensor rows = at::arange(4, at::kDouble).unsqueeze(1).expand({4, 3});
        const at::Tensor own = reduce_scatter_to_group(rows, tp, 0, "rows");
        EXPECT_TRUE(at::equal(own, at::full({1, 3}, 4.0 * (state.rank() % 4), at::kDouble)));
      },
      options);
}

TEST(CrossEntropy, G75FourRanksOfThirtyTwoColumns) {
  run_ranks(4, [](const ParallelState& state) {
    const at::Tensor logits =
        at::arange(32, at::kDouble).remainder(8).expand({16, 32}).contiguous();
    const at::Tensor losses = vocab_parallel_cross_entropy(
        logits, at::arange(0, 32, 2), vocab_partition(128, 128, state.rank(), 4), state.world());
    const at::Tensor expected =
        std::log(16.0) + 7.458340 - ids({0, 2, 4, 6}).to(at::kDouble).repeat({4});
    EXPECT_TRUE(at::allclose(losses, expected, 0, 1e-6));
  });
}

TEST(CrossEntropy, G76LabelSmoothingIsThatOfTheWholeVocabulary) {
  for (const int64_t n : {1, 2, 3, 4})
    run_ranks(n, [n](const ParallelState& state) {
      const VocabPartition part = vocab_partition(8, (8 + n - 1) / n * n, state.rank(), n);
      at::Tensor logits = at::full({1, part.rows}, 100.0, at::kDouble);  // padding must not count
      logits.narrow(1, 0, part.held)
          .copy_(at::arange(part.first, part.first + part.held, at::kDouble));
      const auto loss = [&](double smoothing) {
        return vocab_parallel_cross_entropy(logits, ids({3}), part, state.world(), smoothing)
            .item<double>();
      };
      EXPECT_NEAR(loss(0.1), 4.401197, 1e-6);
      EXPECT_NEAR(loss(0), 4.458340, 1e-6);
    });
}

TEST(CrossEntropy, LeavesItsInputAloneAndIgnoresAndRefusesLabels) {
  run_ranks(2, [](const ParallelState& state) {
    const VocabPartition part = vocab_partition(5, 6, state.rank(), 2);
    at::Tensor logits = numbers({3, 3}, static_cast<double>(state.rank())).to(at::kFloat);
    logits[0].fill_(-1e4);  // of one rank: its exponentials are 0, the loss is finite
    if (state.rank() == 0) logits[0].fill_(1e4);
    const at::Tensor before = logits.clone();
    logits.requires_grad_(true);
    const at::Tensor labels = ids({3, kIgnoredLabel, 1});
    const at::Tensor losses = vocab_parallel_cross_entropy(logits, labels, part, state.world());
    EXPECT_TRUE(at::equal(logits, before));
    EXPECT_EQ(losses.scalar_type(), at::kFloat);
    EXPECT_NEAR(losses[0].item<double>(), 2e4 + std::log(3.0), 1e-2);
    EXPECT_EQ(losses[1].item<double>(), 0);
    losses.sum().backward();
    EXPECT_EQ(logits.grad()[1].abs().max().item<double>(), 0);
    EXPECT_GT(logits.grad()[2].abs().max().item<double>(), 0);
    if (state.rank() == 1) {
      EXPECT_EQ(logits.grad().select(1, 2).abs().max().item<double>(), 0);
    }
    for (const int64_t wrong : {int64_t{5}, int64_t{-1}})
      EXPECT_TRUE(throws_with<UsageError>(
          [&] {
            vocab_parallel_cross_entropy(logits, ids({0, wrong, 1}), part, state.world());
          },
          "labels: found token id " + std::to_string(wrong) + ", allowed: 0 to 4, or -100"));
  });
}

TEST(CrossEntropy, TokenIdsThatAreRuledOutCountForNothing) {
  const double never = -std::numeric_limits<double>::infinity();
  const at::Tensor whole = numbers({4, 6}, 0.3), labels = ids({1, 5, 2, 4});
  whole.select(1, 0).fill_(never);  // the first column of each rank
  whole.select(1, 3).fill_(never);
  const at::Tensor expected = whole.clone().requires_grad_(true);
  const at::Tensor expected_losses =
      at::cross_entropy_loss(expected, labels, /*weight=*/{}, at::Reduction::None);
  expected_losses.sum().backward();
  run_ranks(2, [&](const ParallelState& state) {
    const at::Tensor logits = whole.narrow(1, 3 * state.rank(), 3).clone().requires_grad_(true);
    const VocabPartition part = vocab_partition(6, 6, state.rank(), 2);
    const at::Tensor losses = vocab_parallel_cross_entropy(logits, labels, part, state.world());
    EXPECT_TRUE(at::allclose(losses, expected_losses, 1e-13, 1e-13)) << losses;
    losses.sum().backward();
    EXPECT_TRUE(
        at::allclose(logits.grad(), expected.grad().narrow(1, 3 * state.rank(), 3), 1e-13, 1e-13));
  });
}

TEST(CrossEntropy, ARankWithoutNumbersIsNotPassedOver) {
  const double nan = std::nan(""), never = -std::numeric_limits<double>::infinity();
  const at::Tensor whole = numbers({4, 6}, 0.3);
  whole.narrow(0, 1, 3).narrow(1, 0, 3).fill_(never);  // the columns of the first rank
  whole[2].narrow(0, 0, 3).fill_(nan);
  whole[3][1].fill_(nan);
  run_ranks(2, [&](const ParallelState& state) {
    const at::Tensor logits = whole.narrow(1, 3 * state.rank(), 3).clone();
    const at::Tensor losses = vocab_parallel_cross_entropy(
        logits, ids({1, 5, 4, 4}), vocab_partition(6, 6, state.rank(), 2), state.world());
    EXPECT_TRUE(at::equal(losses.isnan(), ids({0, 0, 1, 1}).to(at::kBool))) << losses;
  });
}

TEST(RandomSeeds, G79AreMegatrons) {
  const ParallelSizes sizes{.world_size = 16, .tensor = 2, .pipeline = 2, .expert = 2};
  for (int64_t rank = 0; rank < 16; ++rank) {
    const auto state = ParallelState::planning_rank(sizes, rank);
    const RandomSeeds seeds = random_seeds(1234, state);
    const auto tp = static_cast<uint64_t>(rank % 2), ep = static_cast<uint64_t>(rank / 2 % 2);
    const uint64_t stage = rank < 8 ? 0 : 100;
    EXPECT_EQ(seeds.replicated, 1234 + stage);
    EXPECT_EQ(seeds.tensor_parallel, 1234 + stage + 2718 + tp);
    EXPECT_EQ(seeds.expert_parallel, 1234 + stage + 1024 + 100 * ep + tp);
  }
}

TEST(Dropout, KeepsItsShareAndScalesIt) {
  LayerContext context{.config = {}, .options = at::TensorOptions(at::kDouble), .name = "here."};
  const Dropout dropout(context, 0.25);
  const at::Tensor x = at::ones({64, 8, 64}, at::kDouble);
  const at::Tensor y = dropout.apply(x, {}, /*training=*/true);
  EXPECT_TRUE(y.eq(0).logical_or_(y.sub(4.0 / 3).abs_().lt(1e-15)).all().item<bool>());
  EXPECT_NEAR(y.eq(0).to(at::kDouble).mean().item<double>(), 0.25, 0.01);
  EXPECT_TRUE(dropout.apply(x, {}, /*training=*/false).is_same(x));
  EXPECT_TRUE(Dropout(context, 0).apply(x, {}, true).is_same(x));
  EXPECT_FALSE(at::equal(dropout.apply(x, {.first_sample = 8}, true), y));
  EXPECT_TRUE(
      at::equal(dropout.apply(x, {.first_sample = 1}, true).narrow(1, 0, 7), y.narrow(1, 1, 7)));
  context.name = "there.";
  EXPECT_FALSE(at::equal(Dropout(context, 0.25).apply(x, {}, true), y));
}

TEST(Dropout, RefusesSharesThatLeaveNothing) {
  const LayerContext context{.config = {}, .options = at::kDouble, .name = "layer."};
  for (const double share : {1.0, -0.5, std::nan("")})
    EXPECT_TRUE(throws_with<UsageError>([&] { Dropout(context, share); },
                                        "layer.: dropout: found a probability of"));
}

TEST(VocabParallelEmbedding, ItsLossIsTheCrossEntropyAndTakesLabelsInTheOrderOfTheLogits) {
  const ParallelContext context{.options = at::kDouble, .name = "table."};
  const VocabParallelEmbedding table(context, 7, 4, 0.5, TableUse::both_ways);
  const at::Tensor tokens = ids({0, 1, 2, 3, 4, 5, 6, 0, 2, 4, 6, 1}).view({3, 4});
  const at::Tensor logits = table.logits(table.embed(tokens));  // [sequence 4, batch 3, 7]
  const at::Tensor labels = tokens.t();
  const at::Tensor expected = at::cross_entropy_loss(logits.flatten(0, 1), labels.flatten(), {}, 0);
  EXPECT_TRUE(at::allclose(table.cross_entropy(logits, labels), expected, 0, 1e-13));
  EXPECT_TRUE(throws_with<UsageError>([&] { table.cross_entropy(logits, tokens); },
                                      "table: labels of shape 3 x 4, allowed: 4 x 3"));
}

TEST(ActivationTest, FollowsTheFormulas) {
  const at::Tensor x = numbers({2, 6}, 0.3) * 4;
  const at::Tensor tanh = at::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x.pow(3)));
  const auto close = [](const at::Tensor& a, const at::Tensor& b) {
    return at::allclose(a, b, /*rtol=*/0, /*atol=*/1e-14);
  };
  EXPECT_TRUE(close(activate(Activation::gelu_tanh, x), 0.5 * x * (1 + tanh)));
  EXPECT_TRUE(close(activate(Activation::gelu, x), 0.5 * x * (1 + at::erf(x / std::sqrt(2)))));
  const at::Tensor gate = x.slice(1, 0, 3);
  EXPECT_TRUE(close(activate(Activation::swiglu, x), gate * at::sigmoid(gate) * x.slice(1, 3)));
}

}  // namespace
}  // namespace lockstep
