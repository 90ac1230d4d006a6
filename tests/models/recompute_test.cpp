#include "lockstep/models/recompute.h"

#include <gtest/gtest.h>

#include <algorithm>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "lockstep/core/error.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/models/gpt_model.h"
#include "lockstep/tests/support/gpt_parts.h"
#include "lockstep/tests/support/memory_counter.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

TEST(Recompute, RunsForwardTwiceAndGivesTheSameGradients) {
  const at::Tensor x = at::arange(1, 5, at::kDouble).requires_grad_(true);
  const at::Tensor weight = at::full({4}, 2.0, at::kDouble).requires_grad_(true);
  int calls = 0;
  const auto function = [&](const std::vector<at::Tensor>& inputs) {
    ++calls;
    return at::tanh(inputs[0] * weight);
  };
  const at::Tensor y = recompute(function, {x});
  EXPECT_EQ(calls, 1);
  y.sum().backward();
  EXPECT_EQ(calls, 2);
  const at::Tensor slope = 1 - at::tanh(x * 2).square();
  EXPECT_TRUE(at::allclose(x.grad(), slope * 2, 1e-13));
  EXPECT_TRUE(at::allclose(weight.grad(), slope * x, 1e-13));
}

TEST(Recompute, ReachesParametersWhereNoInputNeedsAGradient) {
  const at::Tensor weight = at::ones({2}).requires_grad_(true);
  recompute([&](const std::vector<at::Tensor>& in) { return in[0] * weight; }, {at::ones({2})})
      .sum()
      .backward();
  EXPECT_TRUE(at::equal(weight.grad(), at::ones({2})));
}

TEST(Recompute, WhatDependsOnNothingThatIsTrainedGetsNoGradient) {
  const at::Tensor factor = at::arange(3, at::kDouble).requires_grad_(true);
  const at::Tensor x = at::ones({3}, at::kDouble), frozen = x * 3;
  const auto function = [&](const std::vector<at::Tensor>& in) { return in[0] * frozen; };
  (recompute(function, {x}) * factor).sum().backward();
  EXPECT_TRUE(at::equal(factor.grad(), frozen));
  const auto forgets = [](const std::vector<at::Tensor>& in) { return in[0].detach() * 2; };
  (recompute(forgets, {factor}) + factor).sum().backward();
  EXPECT_TRUE(at::equal(factor.grad(), frozen + 1));
}

/// A view of an input that is made without a graph looks like a parameter.
TEST(Recompute, AnInputIsFreeOnceTheFunctionsBackwardIsOver) {
  const at::Tensor x = at::ones({8, 8}).requires_grad_(true);
  const at::Tensor before = x * 2;
  at::Tensor input = before * 3;
  const auto memory = input.storage().getWeakStorageImpl();
  bool seen = false;
  before.register_hook([&](const at::Tensor&) {
    seen = true;
    EXPECT_TRUE(memory.expired());
  });
  at::Tensor y = recompute(
      [](const std::vector<at::Tensor>& in) {
        return at::matmul(in[0].t(), in[0].view({8, 8}));
      },
      {input});
  input.reset();
  const at::Tensor loss = y.sum();
  loss.backward();
  EXPECT_TRUE(seen);
}

TEST(Recompute, TheFirstLayersMayBeFrozen) {
  const auto gradients = [](RecomputeGranularity granularity) {
    TransformerConfig config = testing::small_gpt();
    config.untie_embeddings_and_output_weights = true;
    config.recompute_granularity = granularity;
    const GPTModel model(config, {.dtype = at::kDouble});
    for (const NamedParameter& param : collect_parameters(model))
      if (param.name.starts_with("embedding.") || param.name.starts_with("decoder.layers.0."))
        at::Tensor(param.tensor).set_requires_grad(false);
    const at::Tensor ids = testing::sample_ids(config, 2);
    model.forward(ids.slice(1, 0, -1), ids.slice(1, 1)).sum().backward();
    testing::NamedTensors result;
    for (const NamedParameter& param : collect_parameters(model))
      if (param.tensor.grad().defined()) result[param.name] = param.tensor.grad();
    return result;
  };
  const testing::NamedTensors expected = gradients(RecomputeGranularity::none);
  EXPECT_TRUE(expected.contains("decoder.layers.1.self_attention.linear_qkv.weight"));
  for (const auto granularity : {RecomputeGranularity::selective, RecomputeGranularity::full})
    EXPECT_LT(testing::difference(gradients(granularity), expected), 1e-12);
}

TEST(Recompute, RefusesSecondDerivatives) {
  const at::Tensor x = at::ones({2}, at::kDouble).requires_grad_(true);
  const at::Tensor y = recompute([](const auto& in) { return in[0].sin(); }, {x});
  EXPECT_TRUE(testing::throws_with<UsageError>(
      [&] { y.sum().backward({}, /*retain_graph=*/true, /*create_graph=*/true); },
      "recompute: found backward with create_graph"));
}

TEST(Recompute, WithoutGradientsItIsAPlainCall) {
  const at::NoGradGuard no_grad;
  int calls = 0;
  const auto function = [&](const std::vector<at::Tensor>& in) {
    ++calls;
    return in[0] * 2;
  };
  EXPECT_FALSE(recompute(function, {at::ones({2})}).requires_grad());
  EXPECT_EQ(calls, 1);
}

TEST(Recompute, KeepsItsInputsOnly) {
  // sin saves its input. Without recomputation, every intermediate value stays alive until
  // backward; with it, none does.
  const at::Tensor x = at::ones({8}).requires_grad_(true);
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> between;
  const auto function = [&](const std::vector<at::Tensor>& in) {
    at::Tensor value = at::sin(in[0]);
    for (int i = 0; i < 5; ++i) {
      between.emplace_back(value.getIntrusivePtr());
      value = at::sin(value);
    }
    return value;
  };
  const auto alive = [&] {
    return std::count_if(between.begin(), between.end(),
                         [](const auto& weak) { return !weak.expired(); });
  };
  const at::Tensor kept = function({x});
  EXPECT_EQ(alive(), 5);
  between.clear();
  const at::Tensor recomputed = recompute(function, {x});
  EXPECT_EQ(between.size(), 5u);
  EXPECT_EQ(alive(), 0);
}

/// Two recomputed functions and code outside use `shared`; one function uses `alone`.
struct Reused : torch::nn::Module {
  explicit Reused(bool recomputed) : recomputed_(recomputed) {
    for (const char* const name : {"shared", "alone"}) {
      at::Tensor value = at::empty({3, 3}, at::kDouble);
      fill_normal(value, 0.5, 1, name, {3, 3});
      weights_.push_back(register_parameter(name, value));
    }
  }
  at::Tensor loss(const at::Tensor& x) const {
    const at::Tensor &shared = weights_[0], &alone = weights_[1];
    const auto run = [&](const RecomputedFunction& function, const at::Tensor& input) {
      return recomputed_ ? recompute(function, {input}) : function({input});
    };
    at::Tensor h = at::tanh(at::matmul(x, shared));
    h = run([&](const auto& in) { return at::tanh(at::matmul(at::matmul(in[0], shared), alone)); },
            h);
    h = run([&](const auto& in) { return at::tanh(at::matmul(in[0], shared)); }, h);
    return at::matmul(h, shared).square().sum();
  }

 private:
  bool recomputed_;
  std::vector<at::Tensor> weights_;
};

TEST(Recompute, AParameterUsedInsideAndOutsideIsReducedOnceFromTheFirstStep) {
  const auto input = [](int64_t rank, int64_t microbatch) {
    return at::sin(at::arange(6, at::kDouble) + 5 * rank + 3 * microbatch).view({2, 3});
  };
  for (const int64_t microbatches : {1, 2}) {
    Reused oracle(/*recomputed=*/false);
    for (const int64_t rank : {0, 1})
      for (int64_t m = 0; m < microbatches; ++m) oracle.loss(input(rank, m)).backward();
    testing::CollectiveLog log;
    testing::run_ranks(2,
                       [&](const ParallelState& state) {
                         Reused net(/*recomputed=*/true);
                         DistributedDataParallelConfig config;
                         config.bucket_size = 1;
                         DistributedDataParallel ddp(net, state, config);
                         for (int step = 0; step < 2; ++step) {
                           ddp.zero_grad_buffer();
                           const size_t before = log.of_rank(state.rank()).size();
                           for (int64_t m = 0; m < microbatches; ++m) {
                             std::optional<DistributedDataParallel::NoSyncGuard> guard;
                             if (m + 1 < microbatches) guard.emplace(ddp.no_sync());
                             net.loss(input(state.rank(), m)).backward();
                           }
                           EXPECT_EQ(log.of_rank(state.rank()).size(),
                                     before + 2);  // inside backward
                           ddp.finish_grad_sync();
                           for (size_t i = 0; i < 2; ++i)
                             EXPECT_TRUE(at::allclose(net.parameters()[i].grad(),
                                                      oracle.parameters()[i].grad(), 1e-12, 1e-14))
                                 << microbatches << " " << i;
                         }
                       },
                       {.log = &log});
  }
}

TEST(Recompute, GradReachesParametersToo) {
  const at::Tensor x = at::ones({2}, at::kDouble).requires_grad_(true);
  const at::Tensor weight = at::full({2}, 0.5, at::kDouble).requires_grad_(true);
  const auto function = [&](const std::vector<at::Tensor>& in) {
    return recompute([&](const auto& inner) { return (inner[0] * weight).sin(); }, {in[0]});
  };
  const auto slopes = torch::autograd::grad({recompute(function, {x}).sum()}, {x, weight});
  EXPECT_TRUE(at::allclose(slopes[0], weight * (x * weight).cos(), 1e-14));
  EXPECT_TRUE(at::allclose(slopes[1], x * (x * weight).cos(), 1e-14));
}

TEST(Recompute, GptGradientsAreTheSameOnTwoRanks) {
  const at::Tensor ids = (at::arange(2 * 9) * 7).remainder(11).view({2, 9});
  std::vector<at::Tensor> expected;
  for (const auto granularity :
       {RecomputeGranularity::none, RecomputeGranularity::selective, RecomputeGranularity::full}) {
    testing::run_ranks(2, [&](const ParallelState& state) {
      TransformerConfig config;
      config.hidden_size = 16;
      config.seq_length = 8;
      config.vocab_size = 11;
      config.num_layers = 3;
      config.recompute_granularity = granularity;
      if (granularity == RecomputeGranularity::full) config.recompute_num_layers = 2;
      GPTModel model(config, {.dtype = at::kDouble});
      DistributedDataParallelConfig ddp_config;
      ddp_config.bucket_size = 1;
      DistributedDataParallel ddp(model, state, ddp_config);
      const at::Tensor mine = ids.slice(0, state.rank(), state.rank() + 1);
      model.forward(mine.slice(1, 0, 8), mine.slice(1, 1)).sum().backward();
      finalize_model_grads({&ddp}, at::full({}, 8));
      if (state.rank() != 0) return;
      const auto parameters = model.parameters();
      if (granularity == RecomputeGranularity::none)
        for (const at::Tensor& p : parameters) expected.push_back(p.grad().clone());
      for (size_t i = 0; i < parameters.size(); ++i)
        EXPECT_TRUE(at::allclose(parameters[i].grad(), expected[i], 1e-13, 1e-15))
            << to_string(granularity) << " " << i;
    });
  }
  EXPECT_FALSE(expected.empty());
}

/// What a rank of tp 2 measures in a forward and backward.
struct TwoRanks {
  std::vector<at::Tensor> gradients;  ///< of rank 0
  int64_t kept = 0;                   ///< bytes between forward and backward
  int64_t peak = 0;
  std::vector<std::string> gathered;  ///< label and bytes of the all-gathers of rank 0
};

constexpr int64_t kMicroBatch = 2;

TransformerConfig recomputing(RecomputeGranularity granularity, bool distribute = false) {
  TransformerConfig config = testing::small_gpt();
  config.num_layers = 3;
  config.recompute_granularity = granularity;
  if (granularity == RecomputeGranularity::full) config.recompute_num_layers = 2;
  config.distribute_saved_activations = distribute;
  return config;
}

TwoRanks run_on_two_ranks(const TransformerConfig& config) {
  TwoRanks result;
  testing::CollectiveLog log;
  const testing::Layout layout{.tensor = 2};
  testing::run_ranks(
      2,
      [&](const ParallelState& state) {
        const GPTModel model(config, layout.parallel(), state, GPTStage::whole(config),
                             {.dtype = at::kDouble});
        const at::Tensor ids = testing::sample_ids(config, kMicroBatch);
        for (const at::Tensor& p : model.parameters()) p.mutable_grad() = at::zeros_like(p);
        const testing::MemoryCounter memory;
        const at::Tensor loss = model.forward(ids.slice(1, 0, -1), ids.slice(1, 1)).sum();
        const int64_t kept = memory.bytes();
        loss.backward();
        if (state.rank() != 0) return;
        result.kept = kept;
        result.peak = memory.peak();
        for (const at::Tensor& p : model.parameters()) result.gradients.push_back(p.grad().clone());
      },
      layout.threads(&log));
  for (const CollectiveRecord& call : log.of_rank(0))
    if (call.operation == "all_gather" && call.label.starts_with("saved"))
      result.gathered.push_back(call.label + ": " + std::to_string(call.bytes));
  return result;
}

TEST(Recompute, PartsOfTheSavedInputsAreGatheredInBackward) {
  const TwoRanks whole = run_on_two_ranks(recomputing(RecomputeGranularity::full));
  const TwoRanks parts = run_on_two_ranks(recomputing(RecomputeGranularity::full, true));
  ASSERT_EQ(parts.gradients.size(), whole.gradients.size());
  for (size_t i = 0; i < whole.gradients.size(); ++i)
    EXPECT_TRUE(at::equal(parts.gradients[i], whole.gradients[i])) << i;
  EXPECT_EQ(whole.gathered, std::vector<std::string>());
  const std::string bytes = std::to_string(8 * kMicroBatch * 16 * 8 / 2);
  EXPECT_EQ(parts.gathered, (std::vector<std::string>{"saved decoder.layers.1 input: " + bytes,
                                                      "saved decoder.layers.0 input: " + bytes}));
}

// T = 8 * 2 tokens, h = 16, f = 24 / 2, 4 / 2 heads of 4 channels, elements of e = 8 bytes,
// RMSNorm. A layer keeps (see activation_plan.h) for its 2 norms 2 (2 T h e + T e); for attention T
// e times 8 queries, 8 keys, 8 values, 8 of the core's output and 2 log-sum-exp; for feed-forward 3
// f T e. Full recomputation keeps T h e instead, or half of that on a rank of tp if it is
// distributed; selective recomputation keeps all but the log-sum-exp.
TEST(Recompute, WhatIsKeptFallsAsTheFormulaSays) {
  constexpr int64_t kTe = 8 * kMicroBatch * 8, kHidden = 16, kFfn = 12;
  constexpr int64_t kLayer = kTe * (2 * (2 * kHidden + 1) + (4 * 8 + 2) + 3 * kFfn);
  const TwoRanks none = run_on_two_ranks(recomputing(RecomputeGranularity::none));
  const TwoRanks selective = run_on_two_ranks(recomputing(RecomputeGranularity::selective));
  const TwoRanks full = run_on_two_ranks(recomputing(RecomputeGranularity::full));
  const TwoRanks parts = run_on_two_ranks(recomputing(RecomputeGranularity::full, true));
  EXPECT_EQ(none.kept - selective.kept, 3 * 2 * kTe);
  EXPECT_EQ(none.kept - full.kept, 2 * (kLayer - kTe * kHidden));
  EXPECT_EQ(full.kept - parts.kept, 2 * kTe * kHidden / 2);
  EXPECT_LT(full.peak, none.peak);
  EXPECT_LE(parts.peak, full.peak);
}

/// Bytes that the layers of `stage`, which is neither first nor last, keep for backward.
int64_t kept_by(const TransformerConfig& config, const GPTStage& stage) {
  const GPTModel model(config, ParallelConfig{}, ParallelState::single_process(), stage,
                       {.dtype = at::kDouble});
  const at::Tensor hidden =
      at::sin(at::arange(8 * kMicroBatch * 16, at::kDouble)).view({8, kMicroBatch, 16});
  hidden.requires_grad_(true);
  const testing::MemoryCounter memory;
  const at::Tensor output = model.forward(GPTInput{.hidden = hidden});
  return memory.bytes() - static_cast<int64_t>(output.nbytes());
}

// In one process a layer of the configuration above (h = 16, f = 24, 4 heads, 2 query groups) keeps
// what WhatIsKeptFallsAsTheFormulaSays counts, which has half of the heads and of f.
TEST(Recompute, NumberOfLayersCountsFromTheFirstOfEachStage) {
  constexpr int64_t kTe = 8 * kMicroBatch * 8, kHidden = 16, kFfn = 24;
  constexpr int64_t kLayer = kTe * (2 * (2 * kHidden + 1) + 2 * (4 * 8 + 2) + 3 * kFfn);
  TransformerConfig none = recomputing(RecomputeGranularity::none), full = none;
  none.num_layers = full.num_layers = 6;
  full.recompute_granularity = RecomputeGranularity::full;
  for (const GPTStage& stage : {GPTStage{0, 3}, GPTStage{3, 3}, GPTStage{1, 2}, GPTStage{5, 1}})
    for (const int64_t layers : {1, 2, 5}) {
      full.recompute_num_layers = layers;
      const int64_t recomputed = std::min(layers, stage.num_layers);
      EXPECT_EQ(kept_by(none, stage) - kept_by(full, stage), recomputed * (kLayer - kTe * kHidden))
          << layers << " of " << stage.num_layers << " from " << stage.first_layer;
    }
}

}  // namespace
}  // namespace lockstep
