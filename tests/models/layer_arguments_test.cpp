// Sizes, initial values and inputs that a layer does not support are refused by name, before
// anything is sent.

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/ThreadLocalState.h>
#include <torch/csrc/autograd/autograd.h>

#include "lockstep/core/error.h"
#include "lockstep/core/gradient_capture.h"
#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/distributed/gradient_synchronizer.h"
#include "lockstep/distributed/reducer.h"
#include "lockstep/models/cross_entropy.h"
#include "lockstep/models/embedding.h"
#include "lockstep/models/linear.h"
#include "lockstep/models/linear_function.h"
#include "lockstep/models/normalization.h"
#include "lockstep/models/recompute.h"
#include "lockstep/pipeline/split_backward.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::run_ranks;
using testing::throws_with;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

ParallelContext layer(const ParallelState& state = ParallelState::single_process(),
                      bool sequence_parallel = false) {
  return {.state = state,
          .options = at::kDouble,
          .sequence_parallel = sequence_parallel,
          .name = "layer."};
}

void expect_refused(const std::function<void()>& call, const std::string& message) {
  EXPECT_TRUE(throws_with<UsageError>(call, message));
}

void column(int64_t in, std::vector<int64_t> out, double std) {
  ColumnParallelLinear(layer(), in, std::move(out), true, std);
}

TEST(LayerArguments, SizesAndInitialValuesAreRefusedByName) {
  const std::string weight = "parameter 'layer.weight': found ";
  expect_refused([] { column(4, {8}, kNan); }, weight + "a standard deviation of nan");
  expect_refused([] { column(4, {8}, -0.1); }, weight + "a standard deviation of -0.1");
  expect_refused([] { column(4, {8}, 1 / 0.); }, weight + "a standard deviation of inf");
  expect_refused([] { column(4, {}, 0.1); }, "column_parallel_linear_params: out: found no sizes");
  expect_refused([] { column(4, {0}, 0.1); }, weight + "shape [0, 4]");
  expect_refused([] { column(-4, {8}, 0.1); }, weight + "shape [8, -4]");
  expect_refused([] { column(int64_t{1} << 40, {int64_t{1} << 40}, 0.1); },
                 weight + "shape [1099511627776, 1099511627776]");
  expect_refused([] { RowParallelLinear(layer(), 0, 4, false, 0.1); }, weight + "shape [4, 0]");
  expect_refused([] { RowParallelLinear(layer(), 4, 4, false, kNan); },
                 weight + "a standard deviation of nan");
  expect_refused([] { Norm(layer(), 0, Normalization::RMSNorm, 1e-5); }, weight + "shape [0]");
  expect_refused([] { Norm(layer(), 4, Normalization::RMSNorm, kNan); },
                 "layer: epsilon: found nan, allowed: a finite number >= 0");
  expect_refused([] { Norm(layer(), 4, Normalization::LayerNorm, -1); },
                 "layer: epsilon: found -1");
  const auto table = [](int64_t vocab_size, int64_t width) {
    VocabParallelEmbedding(layer(), vocab_size, width, 0.1, TableUse::one_way);
  };
  expect_refused([&] { table(0, 4); }, weight + "shape [0, 4]");
  expect_refused([&] { table(-3, 4); }, weight + "shape [-3, 4]");
  expect_refused([&] { table(3, 0); }, weight + "shape [3, 0]");
}

TEST(LayerArguments, AVocabularyOfNoneIsRefusedOnEveryRank) {
  run_ranks(2,
            [](const ParallelState& state) {
              expect_refused(
                  [&] { VocabParallelEmbedding(layer(state), 0, 4, 0.1, TableUse::one_way); },
                  "parameter 'layer.weight': found shape [0, 4]");
            },
            {.sizes = {.tensor = 2}});
}

at::Tensor zeros(std::vector<int64_t> shape, at::ScalarType dtype = at::kDouble) {
  return at::zeros(shape, dtype);
}

TEST(LayerArguments, InputsOfAnotherWidthRankOrDtypeAreRefusedByNameBeforeAnythingIsSent) {
  testing::CollectiveLog log;
  const auto body = [](const ParallelState& state, bool sequence) {
    const ParallelContext context = layer(state, sequence);
    const ColumnParallelLinear column(context, 4, {8}, true, 0.1);
    const RowParallelLinear row(context, 8, 4, true, 0.1);
    const std::string allowed =
        sequence ? "[sequence / ranks, ..., 4] of Double" : "[..., 4] of Double";
    const std::string in_row = std::to_string(8 / state.group(GroupKind::tp).size());
    expect_refused(
        [&] {
          column.forward(zeros({2, 3, 5}));
        },
        "layer: found an input [2, 3, 5] of Double, allowed: " + allowed);
    expect_refused(
        [&] {
          column.forward(zeros({2, 3, 4}, at::kFloat));
        },
        "layer: found an input [2, 3, 4] of Float, allowed: " + allowed);
    expect_refused([&] { column.forward(zeros({})); }, "layer: found an input [] of Double");
    expect_refused([&] { column.forward(at::Tensor()); }, "layer: found an undefined input");
    expect_refused(
        [&] {
          row.forward(zeros({2, 3, 3}));
        },
        "layer: found an input [2, 3, 3] of Double, allowed: [..., " + in_row + "]");
    if (sequence)
      expect_refused([&] { column.forward(zeros({4})); },
                     "layer: found an input [4] of Double, allowed: [sequence / ranks, ..., 4]");
    const Norm norm(context, 4, Normalization::LayerNorm, 1e-5);
    expect_refused(
        [&] {
          norm.forward(zeros({2, 3, 5}));
        },
        "layer: found an input [2, 3, 5] of Double, allowed: [..., 4] of Double");
    expect_refused(
        [&] {
          norm.forward(zeros({2, 4}, at::kLong));
        },
        "layer: found an input [2, 4] of Long, allowed: [..., 4] of Double");
    const VocabParallelEmbedding table(context, 6, 4, 0.1, TableUse::both_ways);
    expect_refused([&] { table.embed(zeros({3})); },
                   "layer: found tokens [3] of Double, allowed: [batch, sequence] of Long");
    expect_refused(
        [&] {
          table.embed(zeros({2, 3, 4}, at::kLong));
        },
        "layer: found tokens [2, 3, 4] of Long, allowed: [batch, sequence] of Long");
    expect_refused(
        [&] {
          table.logits(zeros({2, 3, 3}));
        },
        "layer: found an input [2, 3, 3] of Double, allowed: ");
    expect_refused([&] { table.cross_entropy(zeros({}), zeros({}, at::kLong)); },
                   "layer: found logits [] of Double, allowed: [..., ");
    const auto rows = table.partition().rows;
    expect_refused(
        [&] {
          table.cross_entropy(zeros({2, 3, rows}), zeros({2, 3}));
        },
        "layer: found labels [2, 3] of Double, allowed: [2, 3] of Long");
    expect_refused(
        [&] {
          table.cross_entropy(zeros({2, rows}, at::kLong), zeros({2}, at::kLong));
        },
        "layer: found logits [2, ");
    expect_refused(
        [&] {
          vocab_parallel_cross_entropy(zeros({2, rows}), zeros({2}), table.partition(),
                                       state.group(GroupKind::tp));
        },
        "vocab_parallel_cross_entropy: found logits [2, ");
  };
  run_ranks(1, [&](const ParallelState& state) { body(state, false); });
  for (const bool sequence : {false, true})
    run_ranks(2, [&](const ParallelState& state) { body(state, sequence); },
              {.sizes = {.tensor = 2}, .log = &log});
  for (int64_t rank = 0; rank < 2; ++rank) EXPECT_TRUE(log.of_rank(rank).empty());
}

TEST(LayerArguments, AWeightThatOneRankOfTpAloneHasFrozenIsRefusedByTheFrontOnEveryRank) {
  run_ranks(2,
            [](const ParallelState& state) {
              const ColumnParallelLinear column(layer(state, true), 4, {8}, false, 0.1);
              at::Tensor(column.weight()).requires_grad_(state.rank() == 0);
              const at::Tensor other =
                  at::ones({2}).requires_grad_(true);  // so each rank trains one
              std::vector<NamedParameter> list = collect_parameters(column);
              list.push_back({"other", other, default_description(other)});
              EXPECT_TRUE(throws_with<CommunicationError>(
                  [&] { DistributedDataParallel(list, state); },
                  "parameter 'weight' is trained on rank 0 and frozen on rank 1"));
            },
            {.sizes = {.tensor = 2}});
}

/// One wrapped layer, and the sum of its outputs, each of which may be recomputed in backward.
struct Wrapped {
  explicit Wrapped(const ParallelContext& context)
      : layer(context, 4, {8}, false, 0.1), ddp(layer, context.state) {}
  at::Tensor loss(int uses, bool recomputed = false) const {
    const auto run = [this](const std::vector<at::Tensor>& in) { return layer.forward(in[0]); };
    at::Tensor sum = at::zeros({}, at::kDouble);
    for (int use = 0; use < uses; ++use) {
      const at::Tensor x = at::full({2, 3, 4}, 1. + use, at::kDouble).requires_grad_();
      sum = sum + (recomputed ? recompute(run, {x}) : run({x})).sum();
    }
    return sum;
  }
  ColumnParallelLinear layer;
  DistributedDataParallel ddp;
};

TEST(LayerArguments, ALayerUsedTwiceInAForwardWithDeferredGradientsIsRefusedByItsCause) {
  for (const bool deferring : {false, true})
    for (const bool recomputed : {false, true}) {
      ParallelContext context = layer();
      context.deferred = std::make_shared<DeferredGradients>();
      context.deferred->defer(deferring);
      const Wrapped wrapped(context);
      expect_refused(
          [&] {
            wrapped.loss(2, recomputed).backward();
            const at::NoGradGuard no_grad;
            for (const auto& task : context.deferred->take()) task();
          },
          "layer: its weight was used twice in one forward, allowed with deferred weight "
          "gradients: once");
    }
}

TEST(LayerArguments, ABackwardInPartsOfALayerWithDeferredGradientsIsRefused) {
  ParallelContext context = layer();
  context.deferred = std::make_shared<DeferredGradients>();
  const ColumnParallelLinear column(context, 4, {8}, true, 0.1);
  const at::Tensor x = at::ones({2, 3, 4}, at::kDouble).requires_grad_(true);
  const at::Tensor loss = column.forward(x).sum();
  SplitBackward split(loss, x);
  expect_refused([&] { split.input_part(at::ones_like(loss)); },
                 "layer: found a backward in two parts (SplitBackward), allowed with deferred "
                 "weight gradients: a whole one; pass the model's `deferred` to "
                 "PipelineExecutorOptions");
}

TEST(LayerArguments, WhatIsCapturedAccumulatesOnAutogradsThreadOfADeviceToo) {
  // An autograd worker takes over the thread-local state of the thread that started backward.
  const auto on_a_worker = [] {
    bool any = false;
    std::thread([&any, state = at::ThreadLocalState()] {
      const at::ThreadLocalStateGuard guard(state);
      any = CapturesAccumulate::any();
    }).join();
    return any;
  };
  EXPECT_FALSE(on_a_worker());
  {
    const CapturesAccumulate captures({});
    EXPECT_TRUE(on_a_worker());
  }
  EXPECT_FALSE(on_a_worker());
}

TEST(LayerArguments, AutogradGradGivesTheGradientOfAWrappedWeightAndAccumulatesNothing) {
  for (const bool recomputed : {false, true}) {
    const Wrapped wrapped(layer());
    const at::Tensor& weight = wrapped.layer.weight();
    const at::Tensor loss = wrapped.loss(2, recomputed);
    const auto found = torch::autograd::grad({loss}, {weight}, {}, {}, false, true);
    const at::Tensor expected = at::full({8, 4}, 6. * (1 + 2), at::kDouble);
    EXPECT_TRUE(found[0].defined() && at::equal(found[0], expected)) << recomputed;
    EXPECT_TRUE(at::equal(weight.grad(), at::zeros_like(weight)));
    EXPECT_EQ(wrapped.ddp.state_text(), "idle");
  }
}

TEST(LayerArguments, AutogradGradAccumulatesNoDeferredGradientOfARecomputedLayer) {
  ParallelContext context = layer();
  context.deferred = std::make_shared<DeferredGradients>();
  const Wrapped wrapped(context);
  const at::Tensor x = at::ones({2, 3, 4}, at::kDouble).requires_grad_(true);
  const auto run = [&](const std::vector<at::Tensor>& in) { return wrapped.layer.forward(in[0]); };
  const at::Tensor found = torch::autograd::grad({recompute(run, {x}).sum()}, {x})[0];
  const at::Tensor& weight = wrapped.layer.weight();
  EXPECT_TRUE(at::allclose(found, weight.sum(0).expand_as(x), 1e-14));
  EXPECT_TRUE(at::equal(weight.grad(), at::zeros_like(weight)));
  EXPECT_EQ(wrapped.ddp.state_text(), "idle");
}

TEST(LayerArguments, WeightsAndBiasesOfALinearLayerAreChecked) {
  const ProcessGroup group = ParallelState::single_process().group(GroupKind::tp);
  const auto run = [&](const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
    return parallel_linear(x, weight, bias, {.group = group, .label = {"layer"}});
  };
  const at::Tensor x = at::ones({3, 4}), weight = at::ones({5, 4});
  for (const at::Tensor& bias : {at::ones({1}), at::ones({}), at::ones({4}), at::ones({5, 5})})
    expect_refused([&] { run(x, weight, bias); }, "found a bias [");
  expect_refused([&] { run(x, weight, at::ones({5}, at::kDouble)); },
                 "found a bias [5] of Double, allowed: 5 elements of Float");
  expect_refused([&] { run(x, at::ones({4}), {}); },
                 "found a weight [4] of Float, allowed: [out..., in] of a floating-point dtype");
  const auto complex = at::kComplexFloat;
  expect_refused([&] { run(x.to(complex), weight.to(complex), {}); }, "found a weight [5, 4] of ");
  EXPECT_EQ(run(x, at::ones({2, 5, 4}), at::ones({2, 5})).sizes(), at::IntArrayRef({3, 10}));
}

TEST(LayerArguments, SumsOverRanksAddABiasOfSeveralDimensionsToItsRows) {
  run_ranks(
      2,
      [](const ParallelState& state) {
        for (const LinearOutput output : {LinearOutput::summed, LinearOutput::sequence_chunk}) {
          const at::Tensor bias = at::tensor({10.0, 20.0}).view({2, 1});
          const at::Tensor found = parallel_linear(
              at::ones({4, 3}, at::kDouble), at::ones({2, 1, 3}, at::kDouble), bias.to(at::kDouble),
              {.group = state.group(GroupKind::tp), .output = output});
          const at::Tensor expected = at::tensor({16.0, 26.0}, at::kDouble).expand_as(found);
          EXPECT_TRUE(at::equal(found, expected)) << found;
        }
      },
      testing::RankThreadOptions{.sizes = {.tensor = 2}});
}

/// Like libtorch's, which have gradients.
TEST(LayerArguments, LayersWithoutInputsOrOutputsHaveGradients) {
  const ProcessGroup group = ParallelState::single_process().group(GroupKind::tp);
  for (const auto& [in, out] : {std::pair(0, 3), std::pair(3, 0), std::pair(0, 0)}) {
    const at::Tensor x = at::ones({2, 5, in}).requires_grad_(true);
    const at::Tensor weight = at::ones({out, in}).requires_grad_(true);
    parallel_linear(x, weight, {}, {.group = group}).sum().backward();
    EXPECT_EQ(x.grad().sizes(), x.sizes());
    EXPECT_EQ(weight.grad().sizes(), weight.sizes());
    EXPECT_EQ(x.grad().abs().sum().item<float>(), 2.0F * 5 * in * out);
  }
}

TEST(LayerArguments, APartOfAVocabularyThatCannotBeIsRefused) {
  const ProcessGroup group = ParallelState::single_process().group(GroupKind::tp);
  for (const VocabPartition& part : {VocabPartition{7, 8, 0, 99}, VocabPartition{7, 8, 3, 7},
                                     VocabPartition{7, 8, -5, 7}, VocabPartition{7, 8, 0, -1}})
    expect_refused(
        [&] {
          vocab_parallel_cross_entropy(at::ones({2, 8}), at::ones({2}, at::kLong), part, group);
        },
        "vocab_parallel_cross_entropy: found a part of the vocabulary of 8 rows");
}

TEST(LayerArguments, ALayerForOtherRanksThanThoseOfTheFrontIsRefusedByName) {
  const std::function<void(const ColumnParallelLinear&, const ParallelState&)> fronts[] = {
      [](auto& net, auto& state) { DistributedDataParallel(net, state); },
      [](auto& net, auto& state) { GradientSynchronizer(net, state, 1, 1).bind(); },
      [](auto& net, auto& state) { Reducer(net, state); },
  };
  for (const auto& wrap : fronts)
    for (const bool same : {false, true})
      run_ranks(
          2,
          [&](const ParallelState& state) {
            const ColumnParallelLinear net(same ? layer(state) : layer(), 4, {8}, true, 0.1);
            if (same) {
              EXPECT_NO_THROW(wrap(net, state));
            } else {
              expect_refused([&] { wrap(net, state); },
                             "parameter 'weight': found a piece for 1 ranks of tp, allowed: for 2");
            }
          },
          testing::RankThreadOptions{.sizes = {.tensor = 2}});
}

}  // namespace
}  // namespace lockstep
