// The plan against the memory that the CPU allocator hands out during forward and backward.

#include "lockstep/planner/memory_plan.h"

#include <gtest/gtest.h>

#include <algorithm>

#include <ATen/ATen.h>

#include "lockstep/planner/activation_plan.h"
#include "lockstep/tests/planner/planned_models.h"
#include "lockstep/tests/support/awaited_gradients.h"
#include "lockstep/tests/support/memory_counter.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/without_onednn.h"

namespace lockstep {
namespace {

using testing::all_models;
using testing::model_of;
using testing::small;
using testing::text_of;
using testing::with;

/// Allocates gradient buffers like a wrapper's, to which linear layers add.
void await_gradients(const GPTModel& model) {
  static int calls = 0;
  for (const NamedParameter& param : collect_parameters(model)) {
    const bool wide = param.tensor.scalar_type() == at::kDouble;
    at::Tensor(param.tensor).mutable_grad() =
        at::zeros(param.tensor.sizes(), wide ? at::kDouble : at::kFloat);
    testing::count_gradients(param.tensor, calls);
  }
}

TEST(MemoryPlan, ActiveParametersLeaveOutTheExpertsThatATokenDoesNotGoTo) {
  const Config dense = small({"model.ffn_hidden_size=82"});
  const Config experts = small({"model.num_experts=6", "model.moe_ffn_hidden_size=40"});
  const int64_t expert = 3 * 48 * 40, layers = 3;
  EXPECT_EQ(num_active_parameters(dense), num_parameters(dense));
  EXPECT_EQ(num_active_parameters(experts), num_parameters(experts) - layers * 4 * expert);
  // A router has as many parameters as 6 / 3 additional FFN channels.
  EXPECT_EQ(num_active_parameters(experts), num_parameters(dense));
}

TEST(MemoryPlan, TheExampleOfExpertsHasAsManyActiveParametersAsItsTwin) {
  const auto example = [](const char* name) {
    return load_config(std::string(LOCKSTEP_SOURCE_DIR) + "/configs/" + name);
  };
  const Config experts = example("moe_tiny.textproto"), dense = example("tiny.textproto");
  EXPECT_EQ(num_active_parameters(experts), num_parameters(dense));
  EXPECT_GT(num_parameters(experts), 4 * num_parameters(dense));
}

TEST(MemoryPlan, TheVocabularyOfAJobForGpusIsPaddedTo128) {
  const auto rows = [](const std::vector<std::string>& more) {
    std::vector<std::string> all = {"model.vocab_size=50257"};
    all.insert(all.end(), more.begin(), more.end());
    return local_widths(small(all)).vocabulary;
  };
  const std::string two = "parallel.tensor_model_parallel_size=2", cuda = "train.device=cuda";
  EXPECT_EQ(rows({}), 50257);
  EXPECT_EQ(rows({"train.device=cpu"}), 50257);
  EXPECT_EQ(rows({cuda}), 50304);
  EXPECT_EQ(rows({cuda, two}), 50432 / 2);
  EXPECT_EQ(rows({cuda, "model.make_vocab_size_divisible_by=1"}), 50257);
}

TEST(MemoryPlan, ActivationsBesideAdaptersAreAtMostWhatIsPlanned) {
  const std::string all =
      R"(lora.target_modules=["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"])";
  for (const std::vector<std::string>& overrides : std::vector<std::vector<std::string>>{
           {}, {all}, {all, "lora.dropout=0.1"}, {all, "train.precision=bf16"}}) {
    SCOPED_TRACE(text_of(overrides));
    const Config config = small(with({"lora.rank=6"}, overrides));
    const auto model = model_of(config);
    const std::vector<int64_t> shape = {config.train.micro_batch_size, config.model.seq_length};
    const at::Tensor ids = at::randint(config.model.vocab_size, shape, at::kLong);
    const ActivationPlan plan = plan_activations(config, chunks_of_stage(config, 0).front(), 0);
    const testing::MemoryCounter counter;
    const at::Tensor losses = model->forward(ids, ids);
    EXPECT_LE(counter.bytes(), plan.layers + plan.ends);
    EXPECT_GT(static_cast<double>(counter.bytes()),
              0.6 * static_cast<double>(plan.layers + plan.ends));
  }
}

TEST(MemoryPlan, ActivationsAreWhatAutogradKeeps) {
  for (const auto& overrides : all_models()) {
    SCOPED_TRACE(text_of(overrides));
    const Config config = small(overrides);
    const auto model = model_of(config);
    await_gradients(*model);
    const std::vector<int64_t> shape = {config.train.micro_batch_size, config.model.seq_length};
    const at::Tensor tokens = at::randint(config.model.vocab_size, shape, at::kLong);
    const at::Tensor labels = at::randint(config.model.vocab_size, shape, at::kLong);
    const ActivationPlan plan = plan_activations(config, chunks_of_stage(config, 0).front(), 0);

    const testing::MemoryCounter counter;
    {
      at::Tensor losses = model->forward(tokens, labels);
      EXPECT_EQ(counter.bytes(), plan.layers + plan.ends);
      losses.sum().backward();
    }
    const auto planned = static_cast<double>(plan.layers + plan.ends + plan.working);
    const bool drops = config.model.attention_dropout > 0;
    const bool recomputed = config.model.recompute_granularity != RecomputeGranularity::none;
    const double most = recomputed ? 1.05 : drops ? 1.03 : 1.01;
    EXPECT_LT(static_cast<double>(counter.peak()), most * planned);
    // Where a large part of a layer is recomputed, the layers after it are free already.
    const bool large = config.model.num_experts || config.model.attention_dropout > 0;
    const double least = recomputed && large ? 0.65 : drops ? 0.85 : 0.9;
    EXPECT_GT(static_cast<double>(counter.peak()), least * planned);
  }
}

TEST(MemoryPlan, TheHeadInChunksNeedsAFifthOfTheMemory) {
  constexpr double kIds = 128000;
  const auto peak_of = [](const std::vector<std::string>& more) {
    const Config config =
        small(with({"model.vocab_size=128000", "model.num_layers=1", "model.seq_length=64",
                    "train.micro_batch_size=4", "model.hidden_size=8", "model.ffn_hidden_size=16"},
                   more));
    const auto model = model_of(config);
    await_gradients(*model);
    const at::Tensor ids = at::arange(4 * 65).remainder(128000).view({4, 65});
    const ActivationPlan plan = plan_activations(config, chunks_of_stage(config, 0).front(), 0);
    const testing::MemoryCounter counter;
    model->forward(ids.slice(1, 0, -1), ids.slice(1, 1)).sum().backward();
    const auto planned = static_cast<double>(plan.layers + plan.ends + plan.working);
    const auto peak = static_cast<double>(counter.peak());
    EXPECT_LT(peak, 1.01 * planned);
    EXPECT_GT(peak, 0.9 * planned);
    return peak;
  };
  const double whole = peak_of({}), chunked = peak_of({"model.cross_entropy_chunk_size=16"});
  std::printf("vocabulary of 128,000, 256 tokens: %.1f MB at once, %.1f MB in chunks of 16\n",
              whole / 1e6, chunked / 1e6);
  EXPECT_GT(whole, 256 * kIds * 4);
  EXPECT_GT(chunked, 16 * kIds * 4);
  EXPECT_GT(whole, 5 * chunked);
}

TEST(MemoryPlan, RecomputedLayersOfAStageAreWhatAutogradKeeps) {
  for (const char* method : {"block", "uniform"})
    for (const int64_t count : {1, 2, 4}) {
      const Config config = small({"model.num_layers=6", "model.moe_layer_freq=[0, 0, 0, 1, 0, 1]",
                                   "model.num_experts=4", "model.recompute_granularity=full",
                                   fmt::format("model.recompute_method={}", method),
                                   fmt::format("model.recompute_num_layers={}", count)});
      SCOPED_TRACE(fmt::format("{} {}", method, count));
      for (const ModelChunk& chunk : {ModelChunk{.first_layer = 0, .num_layers = 3},
                                      {.first_layer = 3, .num_layers = 3},
                                      {.first_layer = 5, .num_layers = 1}}) {
        const GPTModel model(config.model, config.parallel, ParallelState::single_process(),
                             GPTStage{chunk.first_layer, chunk.num_layers}, {});
        const testing::MemoryCounter counter;
        at::Tensor hidden = at::sin(at::arange(40 * 3 * 48, at::kFloat)).view({40, 3, 48});
        const at::Tensor output = model.forward(GPTInput{.hidden = hidden.requires_grad_(true)});
        const ActivationPlan plan = plan_activations(config, chunk, chunk.first_layer);
        EXPECT_EQ(counter.bytes() - static_cast<int64_t>(output.nbytes()), plan.layers)
            << chunk.num_layers << " from " << chunk.first_layer;
      }
    }
}

TEST(MemoryPlan, ActivationsOfTensorParallelRanksAreWhatAutogradKeeps) {
  const std::string sequence_parallel = "parallel.sequence_parallel=true";
  for (const auto& overrides : std::vector<std::vector<std::string>>{
           {},
           {"model.hidden_dropout=0.1", "model.normalization=LayerNorm"},
           {"model.recompute_granularity=full"},
           {"model.num_query_groups=1"},
           testing::latent({"model.q_lora_rank=20", "model.qk_layernorm=true"}),
           testing::latent({"train.precision=bf16"}),
           {"model.label_smoothing=0.1"},
           {"model.cross_entropy_chunk_size=30"},
           {"model.num_experts=4"},
           {"model.num_experts=4", "train.precision=bf16"},
           {"model.num_experts=4", "model.moe_shared_expert_intermediate_size=20"}})
    for (const bool sequence : {false, true}) {
      auto all = with(overrides, {"parallel.tensor_model_parallel_size=2"});
      if (sequence) all.push_back(sequence_parallel);
      SCOPED_TRACE(text_of(all));
      const Config config = small(all);
      const ActivationPlan plan = plan_activations(config, chunks_of_stage(config, 0).front(), 0);
      testing::run_ranks(
          2,
          [&](const ParallelState& state) {
            const GPTModel model(config.model, config.parallel, state,
                                 GPTStage::whole(config.model),
                                 {.dtype = parameter_dtype(config.train.precision)});
            const at::Tensor ids = at::arange(3 * 41).remainder(300).view({3, 41});
            const testing::MemoryCounter counter;
            const at::Tensor losses = model.forward(ids.slice(1, 0, -1), ids.slice(1, 1));
            EXPECT_NEAR(static_cast<double>(counter.bytes()),
                        static_cast<double>(plan.layers + plan.ends), 500);  // counts of experts
          },
          {.sizes = parallel_options(config, c10::kCPU).sizes});
    }
}

TEST(MemoryPlan, StagesAndRanksOfTensorParallelismAddUp) {
  const auto parameters = [](const std::vector<std::string>& overrides, int64_t stage) {
    return plan_memory(small(overrides)).stages.at(static_cast<size_t>(stage)).parameters;
  };
  const int64_t all = parameters({}, 0), table = 300 * 48;
  const std::string three = "parallel.pipeline_model_parallel_size=3";
  const int64_t layer = (all - table - 48) / 3;
  EXPECT_EQ(parameters({three}, 0), table + layer);
  EXPECT_EQ(parameters({three}, 1), layer);
  EXPECT_EQ(parameters({three}, 2), layer + 48 + table);  // the tied table exists twice
  const int64_t norms = 7 * 48;
  const std::string two = "parallel.tensor_model_parallel_size=2";
  EXPECT_EQ(parameters({two}, 0), (all - norms) / 2 + norms);
  EXPECT_EQ(parameters({two, "model.num_query_groups=1"}, 0),
            (parameters({"model.num_query_groups=1"}, 0) - norms) / 2 + norms);
}

TEST(MemoryPlan, AJobFitsIfItsLargestStageDoes) {
  for (const char* layout :
       {"parallel.pipeline_model_parallel_size=1", "parallel.pipeline_model_parallel_size=3"}) {
    const Config config = small({layout, "train.global_batch_size=18"});
    const MemoryPlan plan = plan_memory(config, 3);
    int64_t most = 0;
    for (const StageMemory& stage : plan.stages) most = std::max(most, stage.total_bytes());
    const auto bytes = static_cast<double>(most);
    EXPECT_TRUE(fits_memory(config, 3, bytes));
    EXPECT_FALSE(fits_memory(config, 3, bytes - 1));
    const auto activations = static_cast<double>(plan.stages.front().activation_bytes);
    EXPECT_FALSE(fits_memory(config, 3, activations - 1));
    EXPECT_FALSE(fits_memory(config, 3, 0));
  }
}

TEST(MemoryPlan, TheDistributedOptimizerHoldsOneShard) {
  const std::vector<std::string> overrides = {"train.precision=bf16",
                                              "ddp.use_distributed_optimizer=true"};
  const StageMemory one = plan_memory(small(overrides), 1).stages.at(0);
  const StageMemory eight = plan_memory(small(overrides), 8).stages.at(0);
  EXPECT_EQ(one.parameter_bytes * 6, one.optimizer_bytes);
  EXPECT_EQ(eight.parameter_bytes * 6, eight.optimizer_bytes * 8);
  auto replicas = overrides;
  replicas.emplace_back("parallel.num_distributed_optimizer_instances=4");
  EXPECT_EQ(plan_memory(small(replicas), 8).stages.at(0).optimizer_bytes, one.optimizer_bytes / 2);
}

TEST(MemoryPlan, TermsThatAreAddedInFp32HaveBuffersOfTheirOwn) {
  const std::string field = "ddp.reduce_scatter_with_fp32_accumulation=true";
  for (const int64_t ranks : {1, 2, 4}) {
    const auto stage = [&](const std::vector<std::string>& more) {
      return plan_memory(
                 small(with({"train.precision=bf16", "train.device=cuda",
                             "ddp.use_distributed_optimizer=true", "train.global_batch_size=24"},
                            more)),
                 ranks)
          .stages.front();
    };
    const auto growth = [&](const std::vector<std::string>& more) {
      return stage(with({field}, more)).total_bytes() - stage(more).total_bytes();
    };
    const std::string narrow = "ddp.grad_reduce_in_fp32=false";
    const std::string shares = "ddp.data_parallel_sharding_strategy=optim_grads";
    // One bucket: as many terms as gradients, of 2 bytes each, and a shard of 4 bytes each.
    const int64_t gradients = stage({narrow}).gradient_bytes;
    EXPECT_EQ(growth({narrow}), gradients + gradients / 2 / ranks * 4) << ranks;
    EXPECT_EQ(growth({}), 0) << ranks;
    if (ranks == 1) continue;
    // The embedding table alone is a bucket.
    const int64_t table = 384 * 48;
    const int64_t two = growth({narrow, shares, "ddp.overlap_grad_reduce=true",
                                "ddp.overlap_param_gather=true", "ddp.bucket_size=1000"});
    EXPECT_GE(two, 2 * table * 2 + table / ranks * 4) << ranks;
    EXPECT_LT(two, gradients) << ranks;
  }
}

TEST(MemoryPlan, ShardedGradientsOfModelsWithUnusedParametersExistAtOnce) {
  const auto bytes = [](const std::string& strategy, int64_t batch, const std::string& unused) {
    return plan_memory(small({"ddp.use_distributed_optimizer=true", "ddp.bucket_size=1000",
                              "ddp.data_parallel_sharding_strategy=" + strategy,
                              "ddp.allow_unused_parameters=" + unused,
                              fmt::format("train.global_batch_size={}", batch)}),
                       4)
        .stages.front()
        .gradient_bytes;
  };
  for (const char* const strategy : {"optim_grads", "optim_grads_params"}) {
    // With two micro-batches all gradients exist until the second one's backward.
    const int64_t all = bytes(strategy, 24, "false");
    EXPECT_EQ(bytes(strategy, 12, "true"), all) << strategy;
    EXPECT_LT(bytes(strategy, 12, "false"), all) << strategy;
    EXPECT_GE(all, bytes("optim", 12, "false")) << strategy;
  }
}

TEST(MemoryPlan, ARuleOfOnesOwnTakesThePlaceOfTheConfigurations) {
  const UpdateStatement one = {.name = "lion", .state = {{"exp_avg"}}};
  const UpdateStatement matrices = {.name = "m", .unit = UpdateUnit::matrix};
  const auto bytes = [](const std::vector<std::string>& overrides, const UpdateStatement* rule) {
    return plan_memory(small(overrides), 2, rule).stages.at(0).optimizer_bytes;
  };
  const std::vector<std::string> adam = {"train.precision=bf16"};
  const std::vector<std::string> muon = {"train.precision=bf16", "optimizer.optimizer=muon"};
  EXPECT_EQ(bytes(adam, &one) * 12, bytes(adam, nullptr) * 8);
  EXPECT_EQ(bytes(muon, &one), bytes(adam, &one));
  // Muon keeps 8 bytes per element of a matrix, the rule 4, and adam 12 for all others.
  const int64_t muon_bytes = bytes(muon, nullptr), rule_bytes = bytes(muon, &matrices);
  EXPECT_EQ((bytes(adam, nullptr) - rule_bytes) * 4, (bytes(adam, nullptr) - muon_bytes) * 8);
  EXPECT_LT(rule_bytes, muon_bytes);
  EXPECT_EQ(matrix_layout(small(adam).optimizer), MatrixLayout::cut);
  EXPECT_EQ(matrix_layout(small(muon).optimizer), MatrixLayout::whole);
  EXPECT_EQ(matrix_layout(small(muon).optimizer, &one), MatrixLayout::cut);
  EXPECT_EQ(matrix_layout(small(adam).optimizer, &matrices), MatrixLayout::whole);
}

TEST(MemoryPlan, WhatIsOffloadedFromADeviceIsTheHosts) {
  const auto stages = [](const std::vector<std::string>& overrides) {
    return plan_memory(small(overrides), 4).stages;
  };
  const std::vector<std::string> base = {
      "train.precision=bf16",       "ddp.use_distributed_optimizer=true",
      "train.global_batch_size=24", "parallel.pipeline_model_parallel_size=2",
      "model.num_layers=4",         "model.recompute_granularity=full"};
  const std::vector<std::string> cuda = with(base, {"train.device=cuda"});
  const std::string state = "optimizer.offload=true", inputs = "model.offload_activations=true";
  EXPECT_EQ(stages(with(base, {state, inputs})).at(0).total_bytes(),
            stages(base).at(0).total_bytes());  // the CPU has only one memory
  for (const size_t stage : {0, 1}) {
    const StageMemory all = stages(cuda).at(stage),
                      with_state = stages(with(cuda, {state})).at(stage),
                      with_inputs = stages(with(cuda, {inputs})).at(stage);
    EXPECT_EQ(all.host_bytes, 0);
    EXPECT_EQ(with_state.optimizer_bytes, 0);
    EXPECT_EQ(with_state.total_bytes(), all.total_bytes() - all.optimizer_bytes);
    // 12 bytes of state, an fp32 gradient and a bf16 parameter.
    EXPECT_EQ(with_state.host_bytes * 12, all.optimizer_bytes * (12 + 4 + 2));
    const Config config = small(cuda);
    const int64_t input =
        config.model.seq_length * config.train.micro_batch_size * config.model.hidden_size * 2;
    const int64_t in_flight = stage == 0 ? 2 : 1, layers = 2;
    EXPECT_EQ(with_inputs.host_bytes, in_flight * layers * input);
    // In backward two inputs are back, and the pipeline keeps the input of a later stage.
    const int64_t kept = stage == 0 ? 0 : 1;
    EXPECT_EQ(all.activation_bytes - with_inputs.activation_bytes,
              (in_flight * (layers - kept) - 2) * input);
  }
}

TEST(MemoryPlan, LayersThatAreNotRecomputedWaitOnTheHostWhole) {
  const auto stage = [](const std::vector<std::string>& more) {
    return plan_memory(
               small(
                   with({"train.device=cuda", "model.num_layers=6", "train.precision=bf16"}, more)))
        .stages.front();
  };
  const Config config = small({});
  const int64_t input =
      config.model.seq_length * config.train.micro_batch_size * config.model.hidden_size * 2;
  const std::string offload = "model.offload_activations=true";
  const StageMemory kept = stage({}), offloaded = stage({offload});
  const int64_t layer = offloaded.host_bytes / 6;
  EXPECT_GT(layer, 10 * input);
  EXPECT_EQ(offloaded.host_bytes, 6 * layer);
  // Two layers are on the device, and the input of the first one.
  EXPECT_EQ(kept.activation_bytes - offloaded.activation_bytes, (6 - 2) * layer - input);
  const StageMemory partly =
      stage({offload, "model.recompute_granularity=full", "model.recompute_num_layers=4"});
  EXPECT_EQ(partly.host_bytes, 4 * input + 2 * layer);
}

TEST(MemoryPlan, WhatDoesNotDivideIsRefusedByName) {
  const auto refused = [](const std::vector<std::string>& overrides, int64_t world) {
    try {
      plan_memory(small(overrides), world);
    } catch (const ConfigError& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  const auto contains = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  EXPECT_PRED2(contains, refused({"parallel.tensor_model_parallel_size=3"}, 3),
               "model.num_attention_heads");
  EXPECT_PRED2(contains, refused({"parallel.pipeline_model_parallel_size=2"}, 2),
               "model.num_layers (3)");
  EXPECT_PRED2(contains, refused({"parallel.context_parallel_size=3"}, 3), "model.seq_length");
  EXPECT_PRED2(contains, refused({"parallel.tensor_model_parallel_size=2"}, 3),
               "number of ranks (3)");
  EXPECT_PRED2(contains, refused({"train.global_batch_size=4"}, 1), "train.global_batch_size");
  EXPECT_THROW(plan_memory(small({"model.hidden_size=4000000000", "model.vocab_size=4000000000"})),
               UsageError);
}

}  // namespace
}  // namespace lockstep
