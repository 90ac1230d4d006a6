// The output layer and the loss in chunks of tokens, compared with PyTorch in double and with all
// logits at once; and what they send and keep.

#include "lockstep/models/linear_cross_entropy.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "lockstep/core/error.h"
#include "lockstep/models/cross_entropy.h"
#include "lockstep/models/embedding.h"
#include "lockstep/models/gpt_model.h"
#include "lockstep/tests/support/awaited_gradients.h"
#include "lockstep/tests/support/gpt_parts.h"
#include "lockstep/tests/support/operator_counts.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::NamedTensors;

at::Tensor waves(at::IntArrayRef shape, double seed, at::ScalarType dtype = at::kDouble) {
  const at::Tensor x = at::arange(c10::multiply_integers(shape), at::kDouble);
  return at::sin(x * 0.7 + seed).view(shape).to(dtype);
}

ParallelLinearOptions in_one_process() {
  return {.group = ParallelState::single_process().group(GroupKind::tp), .label = "output_layer"};
}

/// 15 tokens, or another number, over 11 ids. One token has no loss.
constexpr int64_t kTokens = 15, kIds = 11, kWidth = 6;

at::Tensor some_labels(int64_t tokens = kTokens) {
  at::Tensor labels = (at::arange(tokens) * 5).remainder(kIds);
  labels[4] = kIgnoredLabel;
  return labels;
}

struct Gradients {
  at::Tensor losses, hidden, weight;
};

/// Of `hidden` [..., kWidth]. `share` as in PyTorch. Each token's loss has its own weight.
Gradients of_pytorch(const at::Tensor& hidden, double share, const at::Tensor& weights) {
  const at::Tensor x = hidden.detach().requires_grad_(true);
  const at::Tensor w = (waves({kIds, kWidth}, 1) * 2).requires_grad_(true);
  const at::Tensor losses =
      at::cross_entropy_loss(at::linear(x, w).flatten(0, 1), some_labels(weights.numel()),
                             /*weight=*/{}, at::Reduction::None, kIgnoredLabel, share);
  losses.backward(weights);
  return {losses.detach(), x.grad(), w.grad()};
}

TEST(LinearCrossEntropy, IsPyTorchsForEveryChunkAndLayout) {
  constexpr int64_t kPositions = 12, kSamples = 3;  // 1 to 4 ranks cut the positions evenly
  const at::Tensor hidden = waves({kPositions, kSamples, kWidth}, 0);
  const at::Tensor weights = waves({kPositions * kSamples}, 3);
  for (const double smoothing : {0.0, 0.2}) {
    const Gradients exact = of_pytorch(hidden, smoothing * kIds / (kIds - 1), weights);
    for (const int64_t n : {1, 2, 3, 4})
      for (const LinearInput input : {LinearInput::copied, LinearInput::sequence_chunk})
        for (const int64_t chunk : {1, 5, 36, 100}) {
          const bool cut = input == LinearInput::sequence_chunk;
          SCOPED_TRACE(::testing::Message()
                       << n << " ranks, chunks of " << chunk << (cut ? ", sp" : ""));
          testing::run_ranks(n, [&](const ParallelState& state) {
            const int64_t rows = (kIds + n - 1) / n + 1;  // with padding on each rank
            const VocabPartition part = {
                .vocab_size = kIds,
                .rows = rows,
                .first = std::min(kIds, (rows - 1) * state.rank()),
                .held = std::clamp<int64_t>(kIds - (rows - 1) * state.rank(), 0, rows - 1)};
            const at::Tensor table = at::full({rows, kWidth}, 9.0, at::kDouble);
            table.narrow(0, 0, part.held)
                .copy_((waves({kIds, kWidth}, 1) * 2).narrow(0, part.first, part.held));
            table.requires_grad_(true);
            const auto of_rank = [&](const at::Tensor& t) {
              return cut ? t.chunk(n, 0)[static_cast<size_t>(state.rank())] : t;
            };
            const at::Tensor x = of_rank(hidden).clone().requires_grad_(true);
            const at::Tensor losses = parallel_linear_cross_entropy(
                x, table, some_labels(weights.numel()), part,
                {.group = state.world(), .input = input}, chunk, smoothing);
            EXPECT_LT(testing::difference(losses, exact.losses), 1e-13);
            losses.backward(weights);
            EXPECT_LT(testing::difference(x.grad(), of_rank(exact.hidden)), 1e-13);
            EXPECT_LT(testing::difference(table.grad().narrow(0, 0, part.held),
                                          exact.weight.narrow(0, part.first, part.held)),
                      1e-13);
            EXPECT_EQ(
                table.grad().narrow(0, part.held, rows - part.held).abs().sum().item<double>(), 0);
          });
        }
  }
}

/// Losses and gradients of a model for two samples. Joins the parts of tp.
NamedTensors step_of(TransformerConfig config, std::optional<int64_t> chunk,
                     const testing::Layout& layout, testing::CollectiveLog* log = nullptr) {
  config.cross_entropy_chunk_size = chunk;
  NamedTensors all;
  testing::run_ranks(
      layout.tensor,
      [&](const ParallelState& state) {
        GPTModel model(config, layout.parallel(), state, GPTStage::whole(config),
                       {.dtype = at::kDouble});
        const at::Tensor ids = testing::sample_ids(config, 2);
        const at::Tensor losses = model.forward(ids.slice(1, 0, -1), ids.slice(1, 1));
        (losses * waves(losses.sizes(), 0.4)).sum().backward();
        if (layout.tensor > 1 && log) return;
        NamedTensors found = {{"losses", losses.detach()}};
        for (const NamedParameter& param : collect_parameters(model)) {
          const at::Tensor grad = param.tensor.grad();
          if (layout.sequence &&
              param.description.placement(MeshAxis::tp) == Placement(Replicate{}))
            continue;  // only a term of its gradient
          found[param.name] =
              testing::join_parts(param.description, grad, state.group(GroupKind::tp));
        }
        if (state.rank() == 0) all = found;
      },
      layout.threads(log));
  return all;
}

TEST(LinearCrossEntropy, AModelInChunksIsTheModel) {
  for (const bool untied : {false, true})
    for (const bool recomputes : {false, true})
      for (const testing::Layout& layout : {testing::Layout{1}, {2}, {2, true}, {4}, {4, true}}) {
        TransformerConfig config = testing::small_gpt();
        config.untie_embeddings_and_output_weights = untied;
        config.label_smoothing = untied ? 0.1 : 0;
        if (recomputes) config.recompute_granularity = RecomputeGranularity::full;
        SCOPED_TRACE(layout.text() + (untied ? " untied" : " tied"));
        const NamedTensors whole = step_of(config, std::nullopt, layout);
        for (const int64_t chunk : {1, 7, 1000})
          EXPECT_LT(testing::difference(step_of(config, chunk, layout), whole), 1e-12) << chunk;
      }
}

TEST(LinearCrossEntropy, SendsWhatAllLogitsSend) {
  for (const testing::Layout& layout : {testing::Layout{2}, {2, true}}) {
    SCOPED_TRACE(layout.text());
    testing::CollectiveLog whole, chunked;
    step_of(testing::small_gpt(), std::nullopt, layout, &whole);
    step_of(testing::small_gpt(), 3, layout, &chunked);
    const auto calls_of = [](const testing::CollectiveLog& log) {
      std::vector<std::string> calls;
      for (const CollectiveRecord& call : log.of_rank(0))
        calls.push_back(call.label + " " + std::to_string(call.bytes));
      return calls;
    };
    EXPECT_GT(calls_of(whole).size(), 8u);
    EXPECT_EQ(calls_of(chunked), calls_of(whole));
  }
}

TEST(LinearCrossEntropy, LossesAloneNeedNoBackwardAndNarrowDtypesStayClose) {
  TransformerConfig config = testing::small_gpt();
  const at::Tensor ids = testing::sample_ids(config, 2);
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const GPTModel whole(config, {.dtype = dtype});
    config.cross_entropy_chunk_size = 5;
    const GPTModel chunked(config, {.dtype = dtype});
    config.cross_entropy_chunk_size.reset();
    const auto losses_of = [&](const GPTModel& model) {
      return model.forward(ids.slice(1, 0, -1), ids.slice(1, 1));
    };
    const double bound = dtype == at::kFloat ? 1e-5 : 0.02;
    EXPECT_LT(testing::difference(losses_of(chunked), losses_of(whole)), bound);
    losses_of(whole).sum().backward();
    losses_of(chunked).sum().backward();
    const auto expected = collect_parameters(whole), found = collect_parameters(chunked);
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_LT(testing::difference(found[i].tensor.grad(), expected[i].tensor.grad()), bound)
          << expected[i].name;
    const at::NoGradGuard no_grad;
    EXPECT_LT(testing::difference(losses_of(chunked), losses_of(whole)), bound);
    // Logits are still available on request.
    EXPECT_EQ(chunked.forward(ids.slice(1, 0, -1)).size(2), config.vocab_size);
  }
}

TEST(LinearCrossEntropy, TheProductsAddTheWeightsGradientWhereAWrapperWaitsForIt) {
  const VocabPartition part = vocab_partition(kIds, kIds, 0, 1);
  const auto run = [&](const at::Tensor& weight, int64_t chunk) {
    return parallel_linear_cross_entropy(waves({5, 3, kWidth}, 0), weight, some_labels(), part,
                                         in_one_process(), chunk);
  };
  const at::Tensor plain = waves({kIds, kWidth}, 1).requires_grad_(true);
  run(plain, 15).sum().backward();
  const at::Tensor weight = waves({kIds, kWidth}, 1).requires_grad_(true);
  const at::Tensor grad = at::ones_like(weight).detach();
  weight.mutable_grad() = grad;
  int calls = 0;
  testing::count_gradients(weight, calls);
  const at::Tensor losses = run(weight, 4);
  const at::Tensor total = losses.sum();
  {
    const testing::OperatorCounts counts;
    total.backward();
    EXPECT_EQ(counts.of("aten::addmm_"), 4);
    EXPECT_EQ(counts.of("aten::add_"), 0);
  }
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(weight.grad().is_same(grad));
  EXPECT_LT(testing::difference(grad, plain.grad() + 1), 1e-14);
  // torch::autograd::grad() does not change .grad().
  const at::Tensor own = torch::autograd::grad({run(weight, 4).sum()}, {weight})[0];
  EXPECT_LT(testing::difference(own, plain.grad()), 1e-14);
  EXPECT_LT(testing::difference(grad, plain.grad() + 1), 1e-14);
}

TEST(LinearCrossEntropy, AGradientInFp32GetsTheSumOfTheChunksOfNarrowOperands) {
  const VocabPartition part = vocab_partition(kIds, kIds, 0, 1);
  const at::Tensor x = waves({5, 3, kWidth}, 0, at::kBFloat16);
  const at::Tensor weight = waves({kIds, kWidth}, 1, at::kBFloat16).requires_grad_(true);
  int calls = 0;
  testing::count_gradients(weight, calls);
  const at::Tensor grad = at::zeros({kIds, kWidth});
  weight.mutable_grad() = grad;
  parallel_linear_cross_entropy(x, weight, some_labels(), part, in_one_process(), 4)
      .sum()
      .backward();
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(weight.grad().is_same(grad));
  const at::Tensor exact = weight.detach().to(at::kDouble).requires_grad_(true);
  at::cross_entropy_loss(at::linear(x.to(at::kDouble), exact).flatten(0, 1), some_labels())
      .mul(kTokens - 1)
      .backward();
  EXPECT_LT(testing::difference(grad.to(at::kDouble), exact.grad()), 0.02);
}

TEST(LinearCrossEntropy, AGradientInBf16IsRoundedOnceForAllChunks) {
  constexpr int64_t kEqual = 512;
  const VocabPartition part = vocab_partition(kIds, kIds, 0, 1);
  const at::Tensor x = waves({1, 1, kWidth}, 0, at::kBFloat16).expand({kEqual, 1, kWidth});
  const at::Tensor labels = at::full({kEqual}, 3);
  for (const bool used_once : {true, false}) {
    ParallelLinearOptions options = in_one_process();
    options.weight_used_once = used_once;
    const at::Tensor weight = waves({kIds, kWidth}, 1, at::kBFloat16).requires_grad_(true);
    int calls = 0;
    testing::count_gradients(weight, calls);
    weight.mutable_grad() = at::zeros_like(weight, at::kBFloat16);
    parallel_linear_cross_entropy(x, weight, labels, part, options, 1).sum().backward();
    EXPECT_EQ(calls, 1);
    const at::Tensor exact = weight.detach().to(at::kDouble).requires_grad_(true);
    at::cross_entropy_loss(at::linear(x.to(at::kDouble), exact).flatten(0, 1), labels)
        .mul(kEqual)
        .backward();
    const at::Tensor error = (weight.grad().to(at::kDouble) - exact.grad()).abs();
    const at::Tensor most = exact.grad().abs() * 0.02 + 1e-6;
    EXPECT_TRUE(error.le(most).all().item<bool>()) << used_once << ": " << error;
  }
}

TEST(LinearCrossEntropy, RefusesWhatItCannotDoBeforeAnythingIsSent) {
  testing::CollectiveLog log;
  testing::run_ranks(
      2,
      [&](const ParallelState& state) {
        const VocabPartition part = vocab_partition(kIds, 12, state.rank(), 2);
        const at::Tensor weight = waves({6, kWidth}, 1).requires_grad_(true);
        const auto refuses = [&](const at::Tensor& hidden, const at::Tensor& labels, int64_t chunk,
                                 double smoothing, const std::string& message) {
          EXPECT_TRUE(testing::throws_with<UsageError>(
              [&] {
                parallel_linear_cross_entropy(
                    hidden, weight, labels, part,
                    {.group = state.world(), .input = LinearInput::copied, .label = "output_layer"},
                    chunk, smoothing);
              },
              message));
        };
        const at::Tensor x = waves({5, 3, kWidth}, 0);
        refuses(waves({5, 3, 4}, 0), some_labels(), 4, 0, "output_layer: found");
        refuses(x.to(at::kFloat), some_labels(), 4, 0, "output_layer: found");
        refuses(x, some_labels().narrow(0, 0, 3), 4, 0, "output_layer: found labels [3] of Long");
        refuses(x, some_labels(), 0, 0, "output_layer: found chunks of 0 tokens");
        refuses(x, some_labels(), 4, 1, "output_layer: found label smoothing 1");
        refuses(x, some_labels().add(1), 4, 0, "output_layer: labels: found token id 11");
      },
      {.log = &log});
  EXPECT_TRUE(log.of_rank(0).empty());
  const at::Tensor weight = waves({kIds, kWidth}, 1).requires_grad_(true);
  const at::Tensor losses =
      parallel_linear_cross_entropy(waves({5, 3, kWidth}, 0), weight, some_labels(),
                                    vocab_partition(kIds, kIds, 0, 1), in_one_process(), 4);
  EXPECT_TRUE(testing::throws_with<UsageError>(
      [&] { torch::autograd::backward({losses.sum()}, {}, true, /*create_graph=*/true); },
      "output_layer: found backward with create_graph"));
}

TEST(CrossEntropyMemory, TheGradientStandsWhereTheLogitsWereIfTheyAreTaken) {
  const VocabPartition part = vocab_partition(kIds, kIds, 0, 1);
  const ProcessGroup group = ParallelState::single_process().group(GroupKind::tp);
  for (const LogitsMemory memory : {LogitsMemory::kept, LogitsMemory::taken}) {
    const at::Tensor x = waves({kTokens, kWidth}, 0).requires_grad_(true);
    const at::Tensor logits = at::linear(x, waves({kIds, kWidth}, 1));
    const at::Tensor before = logits.detach().clone();
    at::Tensor seen;
    logits.register_hook([&](const at::Tensor& grad) { seen = grad; });
    const at::Tensor losses =
        vocab_parallel_cross_entropy(logits, some_labels(), part, group, 0, memory);
    EXPECT_TRUE(at::equal(logits, before));
    losses.sum().backward({}, /*retain_graph=*/true);
    const bool taken = memory == LogitsMemory::taken;
    EXPECT_EQ(seen.data_ptr() == logits.data_ptr(), taken);
    EXPECT_EQ(at::equal(logits, before), !taken);
    if (taken) {
      EXPECT_TRUE(testing::throws_with<UsageError>(
          [&] { losses.sum().backward(); },
          "found a second backward with LogitsMemory::taken, allowed: one"));
    } else {
      const at::Tensor first = x.grad().clone();
      losses.sum().backward();
      EXPECT_TRUE(at::equal(x.grad(), first * 2));
    }
  }
}

}  // namespace
}  // namespace lockstep
