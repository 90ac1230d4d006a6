#include <gtest/gtest.h>

#include <bit>
#include <mutex>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/models/gpt_model.h"
#include "lockstep/optimizer/clip_grads.h"
#include "lockstep/tests/support/gpt_parts.h"
#include "lockstep/tests/support/rank_threads.h"

// A GPT cut over tensor-parallel ranks, compared with the same GPT in one process.

namespace lockstep {
namespace {

using testing::difference;
using testing::join_parts;
using testing::Layout;
using testing::NamedTensors;
using testing::run_ranks;
using testing::sample_ids;
using testing::small_gpt;

constexpr int64_t kSamples = 4, kMicro = 2;

struct Outcome {
  at::Tensor losses;
  NamedTensors weights;
  NamedTensors gradients;  ///< of the mean over tokens
};

Outcome one_process(const TransformerConfig& config) {
  const GPTModel model(config, {.dtype = at::kDouble});
  const at::Tensor ids = sample_ids(config, kSamples);
  Outcome outcome;
  outcome.losses = model.forward(ids.slice(1, 0, -1), ids.slice(1, 1));
  outcome.losses.mean().backward();
  outcome.losses = outcome.losses.detach();
  for (const NamedParameter& param : collect_parameters(model)) {
    const auto whole = [&](const at::Tensor& tensor) {
      const auto& rows = param.description.unpadded_rows;
      return rows ? tensor.narrow(0, 0, *rows) : tensor;
    };
    outcome.weights[param.name] = whole(param.tensor.detach());
    outcome.gradients[param.name] = whole(param.tensor.grad());
  }
  return outcome;
}

/// The same on `layout`, as rank 0 reports it. The micro-batches are distributed over dp.
Outcome on_layout(const TransformerConfig& config, const Layout& layout,
                  const DistributedDataParallelConfig& ddp_config = {}) {
  Outcome result;
  std::vector<at::Tensor> losses(kSamples / kMicro);
  std::mutex mutex;
  run_ranks(
      layout.tensor * layout.data,
      [&](const ParallelState& state) {
        const GPTModel model(config, layout.parallel(), state, GPTStage::whole(config),
                             {.dtype = at::kDouble});
        const ProcessGroup tp = state.group(GroupKind::tp), dp = state.group(GroupKind::dp_cp);
        Outcome own;
        for (const NamedParameter& param : collect_parameters(model))
          own.weights[param.name] = join_parts(param.description, param.tensor, tp).clone();
        DistributedDataParallel ddp(model, state, ddp_config);
        const at::Tensor ids = sample_ids(config, kSamples);
        const int64_t own_batches = kSamples / kMicro / layout.data;
        for (int64_t i = 0; i < own_batches; ++i) {
          std::optional<DistributedDataParallel::NoSyncGuard> guard;
          if (i + 1 < own_batches) guard.emplace(ddp.no_sync());
          const int64_t m = i * layout.data + dp.rank();
          const at::Tensor batch = ids.slice(0, m * kMicro, (m + 1) * kMicro);
          const at::Tensor loss = model.forward({.tokens = batch.slice(1, 0, -1),
                                                 .labels = batch.slice(1, 1),
                                                 .positions = {.first_sample = m * kMicro}});
          loss.sum().backward();
          const std::lock_guard<std::mutex> lock(mutex);
          if (tp.rank() == 0) losses[static_cast<size_t>(m)] = loss.detach();
        }
        finalize_model_grads({&ddp}, at::full({}, own_batches * kMicro * config.seq_length));
        for (const NamedParameter& param : collect_parameters(model))
          own.gradients[param.name] =
              join_parts(param.description, param.tensor.grad(), tp).clone();
        if (state.rank() == 0) result = std::move(own);
      },
      layout.threads());
  result.losses = at::cat(losses);
  return result;
}

void expect_equal(const Outcome& found, const Outcome& expected) {
  EXPECT_LT(difference(found.losses, expected.losses), 1e-12);
  EXPECT_EQ(difference(found.weights, expected.weights), 0);
  for (const auto& [name, gradient] : expected.gradients) {
    ASSERT_TRUE(found.gradients.contains(name)) << name;
    EXPECT_LT(difference(found.gradients.at(name), gradient), 1e-12) << name;
    EXPECT_GT(gradient.abs().max().item<double>(), 1e-6) << name;
  }
  EXPECT_EQ(found.gradients.size(), expected.gradients.size());
}

TEST(TensorParallel, EveryLayoutGivesTheLossAndGradientsOfOneProcess) {
  // Every model runs on two or three layouts. Any four choices meet on each layout.
  const std::vector<Layout> even = {{1}, {2}, {4, true}}, odd = {{2, true}, {4}};
  for (int variant = 0; variant < 32; ++variant) {
    const auto choice = [&](int bit) { return (variant >> bit & 1) != 0; };
    TransformerConfig config = small_gpt();
    config.num_layers = 1 + variant % 2;
    config.untie_embeddings_and_output_weights = choice(0);
    if (choice(1)) config.num_query_groups = 2;
    config.add_bias_linear = choice(2);
    config.activation = choice(3) ? Activation::gelu : Activation::swiglu;
    config.normalization = choice(3) ? Normalization::LayerNorm : Normalization::RMSNorm;
    config.position_embedding_type =
        choice(4) ? PositionEmbeddingType::learned_absolute : PositionEmbeddingType::rope;
    config.make_vocab_size_divisible_by = choice(0) ? 1 : 4;
    const Outcome expected = one_process(config);
    for (const Layout& layout : std::popcount(static_cast<unsigned>(variant)) % 2 ? odd : even) {
      SCOPED_TRACE(fmt::format("variant {}, {}", variant, layout.text()));
      expect_equal(on_layout(config, layout), expected);
    }
  }
}

TEST(TensorParallel, OneGroupForAllRanksAndDataParallelRanksBeside) {
  TransformerConfig config = small_gpt();
  config.num_query_groups = 1;
  config.add_qkv_bias = true;
  const Outcome expected = one_process(config);
  expect_equal(on_layout(config, {4, true}), expected);
  expect_equal(on_layout(config, {4, false}), expected);
  expect_equal(on_layout(config, {2, true, 2}), expected);
  DistributedDataParallelConfig ddp;
  ddp.bucket_size = 100;
  expect_equal(on_layout(config, {2, false, 2}, ddp), expected);
}

TEST(TensorParallel, EachRankHasATermOfTheGradientOfTheNormsOfQueriesAndKeys) {
  TransformerConfig config = small_gpt();
  config.qk_layernorm = true;
  for (const int64_t groups : {1, 2, 4}) {
    config.num_query_groups = groups;
    config.normalization = groups == 2 ? Normalization::LayerNorm : Normalization::RMSNorm;
    const Outcome expected = one_process(config);
    for (const Layout& layout : {Layout{2}, {2, true}, {4}, {4, true}, {2, false, 2}}) {
      SCOPED_TRACE(fmt::format("{} groups, {}", groups, layout.text()));
      expect_equal(on_layout(config, layout), expected);
    }
  }
}

TEST(TensorParallel, LatentAttentionGivesTheLossAndGradientsOfOneProcess) {
  TransformerConfig config = small_gpt();
  config.multi_latent_attention = true;
  config.kv_lora_rank = 10;
  config.qk_head_dim = 5;
  config.qk_pos_emb_head_dim = 4;
  for (const int64_t value : {3, 12}) {
    config.v_head_dim = value;
    config.qk_layernorm = value == 3;
    if (value == 3) config.q_lora_rank = 6;
    if (value == 12) config.q_lora_rank.reset();
    const Outcome expected = one_process(config);
    for (const Layout& layout : {Layout{2}, {2, true}, {4}, {4, true}, {2, true, 2}}) {
      SCOPED_TRACE(fmt::format("values of {}, {}", value, layout.text()));
      expect_equal(on_layout(config, layout), expected);
    }
  }
}

TEST(TensorParallel, DropoutDrawsTheSameNumbersOnEveryLayoutAndWhenRecomputed) {
  TransformerConfig config = small_gpt();
  config.num_layers = 3;
  config.hidden_dropout = 0.3;
  config.attention_dropout = 0.2;
  config.num_query_groups = 2;
  const Outcome expected = one_process(config);
  for (const Layout& layout : {Layout{2, true}, {4, true}, {2, false, 2}})
    for (const auto granularity : {RecomputeGranularity::none, RecomputeGranularity::selective,
                                   RecomputeGranularity::full}) {
      SCOPED_TRACE(layout.text() + " " + to_string(granularity));
      config.recompute_granularity = granularity;
      config.recompute_num_layers.reset();
      if (granularity == RecomputeGranularity::full) config.recompute_num_layers = 2;
      expect_equal(on_layout(config, layout), expected);
    }
  config.recompute_granularity = RecomputeGranularity::none;
  config.recompute_num_layers.reset();
  config.hidden_dropout = 0;
  config.attention_dropout = 0;
  EXPECT_GT(difference(one_process(config).losses, expected.losses), 0.01);
}

TEST(TensorParallel, LogitsAreGatheredWithoutPadding) {
  TransformerConfig config = small_gpt();
  const at::Tensor tokens = sample_ids(config, 2).slice(1, 0, -1);
  const at::Tensor expected = GPTModel(config, {.dtype = at::kDouble}).forward(tokens);
  config.make_vocab_size_divisible_by = 4;  // of four ranks the last holds only padding
  for (const Layout& layout : {Layout{4}, {4, true}})
    run_ranks(
        4,
        [&](const ParallelState& state) {
          const GPTModel model(config, layout.parallel(), state, GPTStage::whole(config),
                               {.dtype = at::kDouble});
          EXPECT_LT(difference(model.forward(tokens), expected), 1e-12);
        },
        layout.threads());
}

TEST(GPTStages, GiveTheSameBitsAsTheWholeModel) {
  TransformerConfig config = small_gpt();
  config.num_layers = 3;
  for (const bool tied : {true, false}) {
    config.untie_embeddings_and_output_weights = !tied;
    const GPTModel whole(config, {.dtype = at::kDouble});
    const at::Tensor ids = sample_ids(config, 2);
    const at::Tensor tokens = ids.slice(1, 0, -1), labels = ids.slice(1, 1);
    const at::Tensor expected = whole.forward(tokens, labels);
    expected.sum().backward();
    NamedTensors expected_gradients;
    for (const NamedParameter& param : collect_parameters(whole))
      expected_gradients[param.name] = param.tensor.grad();

    const ParallelState state = ParallelState::single_process();
    at::Tensor hidden;
    NamedTensors gradients;
    std::vector<NamedParameter> parameters;
    for (const GPTStage& stage :
         {GPTStage{0, 1, true, false}, GPTStage{1, 2, false, false}, GPTStage{3, 0, false, true}}) {
      const GPTModel part(config, {}, state, stage, {.dtype = at::kDouble});
      hidden = part.forward({.tokens = tokens, .labels = labels, .hidden = hidden});
      for (const NamedParameter& param : collect_parameters(part)) {
        parameters.push_back(param);
        const bool table = param.name == "embedding.word_embeddings.weight";
        EXPECT_EQ(param.description.tie.has_value(), tied && table) << param.name;
      }
    }
    EXPECT_TRUE(at::equal(hidden, expected));
    hidden.sum().backward();
    for (const NamedParameter& param : parameters) {
      at::Tensor& sum = gradients[param.name];
      sum = sum.defined() ? sum + param.tensor.grad() : param.tensor.grad();
    }
    EXPECT_LT(difference(gradients, expected_gradients), tied ? 1e-14 : 1e-300);
  }
}

void run_deferred(const TransformerConfig& config, const Layout& layout, const Outcome& expected) {
  DistributedDataParallelConfig ddp_config;
  ddp_config.bucket_size = 100;  // a bucket that does not wait for its weights is reduced too early
  const auto body = [&](const ParallelState& state) {
    const auto deferred = std::make_shared<DeferredGradients>();
    const GPTModel model(config, layout.parallel(), state, GPTStage::whole(config),
                         {.dtype = at::kDouble, .deferred = deferred});
    DistributedDataParallel ddp(model, state, ddp_config);
    const int64_t samples = kSamples / layout.data;
    const int64_t first = state.group(GroupKind::dp_cp).rank() * samples;
    const at::Tensor ids = sample_ids(config, kSamples).narrow(0, first, samples);
    deferred->defer(true);
    model.forward(ids.slice(1, 0, -1), ids.slice(1, 1)).sum().backward();
    const auto tasks = deferred->take();
    const bool tied = !config.untie_embeddings_and_output_weights;
    EXPECT_EQ(tasks.size(), static_cast<size_t>(config.num_layers * 4 + (tied ? 0 : 1)));
    const at::NoGradGuard no_grad;
    for (const auto& task : tasks) task();
    finalize_model_grads({&ddp}, at::full({}, samples * config.seq_length));
    for (const NamedParameter& param : collect_parameters(model)) {
      const at::Tensor found =
          join_parts(param.description, param.tensor.grad(), state.group(GroupKind::tp));
      EXPECT_LT(difference(found, expected.gradients.at(param.name)), 1e-12) << param.name;
    }
  };
  run_ranks(layout.tensor * layout.data, body, layout.threads());
}

TEST(DeferredGradients, AreReducedOnceTheyAreRun) {
  TransformerConfig config = small_gpt();
  for (const bool tied : {false, true}) {
    config.untie_embeddings_and_output_weights = !tied;
    config.recompute_granularity = tied ? RecomputeGranularity::full : RecomputeGranularity::none;
    const Outcome expected = one_process(config);
    for (const Layout& layout : {Layout{1}, {2}, {2, true, 2}}) {
      SCOPED_TRACE(layout.text());
      run_deferred(config, layout, expected);
    }
  }
}

TEST(TensorParallel, Bf16WithGradientsInFp32IsClose) {
  const TransformerConfig config = small_gpt();
  const at::Tensor ids = sample_ids(config, kMicro);
  const at::Tensor tokens = ids.slice(1, 0, -1), labels = ids.slice(1, 1);
  const GPTModel whole(config, {.dtype = at::kFloat});
  const at::Tensor expected = whole.forward(tokens, labels).detach();
  const Layout layout{2, true};
  const auto body = [&](const ParallelState& state) {
    const GPTModel model(config, layout.parallel(), state, GPTStage::whole(config),
                         {.dtype = at::kBFloat16});
    DistributedDataParallel ddp(model, state);
    const at::Tensor losses = model.forward(tokens, labels);
    EXPECT_EQ(losses.scalar_type(), at::kFloat);
    EXPECT_LT(difference(losses.mean(), expected.mean()), 0.1);
    losses.sum().backward();
    finalize_model_grads({&ddp}, at::full({}, losses.numel()));
    for (const NamedParameter& param : collect_parameters(model))
      EXPECT_EQ(param.tensor.grad().scalar_type(), at::kFloat) << param.name;
  };
  run_ranks(2, body, layout.threads());
}

TransformerConfig g120_config() {
  TransformerConfig config;
  config.num_layers = 2;
  config.hidden_size = 12;
  config.num_attention_heads = 4;
  config.vocab_size = 100;
  config.seq_length = 4;
  config.untie_embeddings_and_output_weights = true;
  config.add_bias_linear = true;
  config.activation = Activation::gelu;
  config.normalization = Normalization::LayerNorm;
  config.position_embedding_type = PositionEmbeddingType::learned_absolute;
  return config;
}

TEST(GPTModel, G120HasMegatronsNumberOfParameters) {
  const auto count = [](const GPTModel& model) {
    int64_t numel = 0;
    for (const NamedParameter& param : collect_parameters(model)) numel += param.tensor.numel();
    return numel;
  };
  const TransformerConfig config = g120_config();
  EXPECT_EQ(count(GPTModel(config)), 6240);
  for (int64_t rank = 0; rank < 2; ++rank) {
    const auto state = ParallelState::planning_rank({.world_size = 2, .tensor = 2}, rank);
    EXPECT_EQ(count(GPTModel(config, Layout{2}.parallel(), state, GPTStage::whole(config))), 3228);
  }
}

/// A layer norm and a column-parallel weight.
struct NormAndColumn : torch::nn::Module {
  NormAndColumn(const TransformerConfig& config, const Layout& layout, const ParallelState& state) {
    const LayerContext context{.config = config,
                               .options = at::TensorOptions(at::kDouble),
                               .parallel = layout.parallel(),
                               .state = state};
    norm = register_module("norm", std::make_shared<Norm>(context.child("norm")));
    column = register_module(
        "column", std::make_shared<ColumnParallelLinear>(context.child("column"), 1,
                                                         std::vector<int64_t>{2}, false, 1.0));
  }
  std::shared_ptr<Norm> norm;
  std::shared_ptr<ColumnParallelLinear> column;
};

TEST(GradNorm, G126AReplicatedNormCountsOnce) {
  TransformerConfig config = small_gpt();
  config.hidden_size = 2;
  for (const bool sequence : {false, true}) {
    const Layout layout{2, sequence};
    run_ranks(
        2,
        [&](const ParallelState& state) {
          const NormAndColumn layers(config, layout, state);
          DistributedDataParallel ddp(layers, state);
          // With sequence parallelism each rank's gradient of the norm is a term of [3, 4].
          const at::Tensor term = at::tensor({3.0, 4.0}, at::kDouble) * (sequence ? 0.5 : 1);
          const at::Tensor loss = (layers.norm->parameters()[0] * term).sum() +
                                  layers.column->weight().sum() * (state.rank() == 0 ? 12 : 0);
          loss.backward();
          finalize_model_grads({&ddp}, at::ones({}));
          EXPECT_NEAR(grad_norm({&ddp}).item<double>(), 13, 1e-12);
        },
        layout.threads());
  }
}

}  // namespace
}  // namespace lockstep
