// The plan against what a run allocates: a GPTModel with its DistributedDataParallel and optimizer,
// and the memory that the CPU allocator hands out during forward and backward.

#include "lockstep/training/memory_plan.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/models/gpt/gpt_model.h"
#include "lockstep/optimizer/distributed_optimizer.h"
#include "lockstep/optimizer/update_rule.h"
#include "lockstep/tests/support/memory_counter.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/training/activation_plan.h"
#include "lockstep/training/run_setup.h"

namespace lockstep {
namespace {

constexpr const char* kSmall = R"(
  model { num_layers: 3 hidden_size: 48 num_attention_heads: 4 ffn_hidden_size: 80 seq_length: 40
          vocab_size: 300 }
  train { micro_batch_size: 3 }
)";

Config small(const std::vector<std::string>& overrides) {
  return parse_config(kSmall, "small", overrides);
}

std::shared_ptr<GPTModel> model_of(const Config& config) {
  return std::make_shared<GPTModel>(
      config.model, GPTModelOptions{.dtype = parameter_dtype(config.train.precision)});
}

const std::vector<std::vector<std::string>> kModels = {
    {},
    {"train.precision=fp64"},
    {"train.precision=bf16"},
    {"model.num_query_groups=2"},
    {"model.num_query_groups=1"},
    {"model.num_query_groups=2", "train.precision=bf16", "model.add_bias_linear=true"},
    {"model.num_query_groups=1", "model.position_embedding_type=none", "model.activation=gelu"},
    {"model.num_query_groups=2", "model.position_embedding_type=learned_absolute",
     "model.normalization=LayerNorm"},
    {"model.normalization=LayerNorm", "train.precision=bf16", "model.add_qkv_bias=true",
     "model.activation=gelu"},
    {"model.normalization=LayerNorm", "train.precision=fp64", "model.rotary_percent=0.5"},
    {"model.untie_embeddings_and_output_weights=true", "model.kv_channels=20"},
    {"train.micro_batch_size=1", "model.num_layers=1"},
    {"model.recompute_granularity=selective"},
    {"model.recompute_granularity=selective", "model.num_query_groups=2", "train.precision=bf16"},
    {"model.recompute_granularity=selective", "model.num_query_groups=2",
     "model.position_embedding_type=none"},
    {"model.recompute_granularity=full"},
    {"model.recompute_granularity=full", "model.recompute_num_layers=2", "train.precision=bf16"},
    {"model.recompute_granularity=full", "model.recompute_method=uniform",
     "model.recompute_num_layers=2"},
    {"model.label_smoothing=0.1", "model.make_vocab_size_divisible_by=128"},
    {"model.label_smoothing=0.1", "train.precision=bf16", "train.micro_batch_size=1"},
    {"model.hidden_size=64", "model.ffn_hidden_size=256", "model.vocab_size=700",
     "model.num_layers=5"},
    {"model.make_vocab_size_divisible_by=128"},
    {"model.hidden_dropout=0.1"},
    {"model.hidden_dropout=0.1", "model.attention_dropout=0.1", "model.seq_length=200"},
    {"model.attention_dropout=0.1", "model.num_query_groups=1", "train.precision=bf16"},
    {"model.attention_dropout=0.1", "model.num_query_groups=1", "train.micro_batch_size=1"},
    {"model.attention_dropout=0.1", "model.num_query_groups=2",
     "model.recompute_granularity=selective"},
    {"model.attention_dropout=0.1", "model.num_query_groups=1",
     "model.position_embedding_type=none", "model.recompute_granularity=selective"},
};

std::vector<std::string> with(std::vector<std::string> list, const std::vector<std::string>& more) {
  list.insert(list.end(), more.begin(), more.end());
  return list;
}

/// kModels and some with experts.
std::vector<std::vector<std::string>> all_models() {
  std::vector<std::vector<std::string>> models = kModels;
  for (const auto& overrides : std::vector<std::vector<std::string>>{
           {},
           {"train.precision=bf16", "model.moe_ffn_hidden_size=24", "model.moe_router_topk=3"},
           {"model.activation=gelu", "model.moe_layer_freq=2", "train.precision=fp64"},
           {"model.moe_layer_freq=[0, 1, 1]"},
           {"model.moe_shared_expert_intermediate_size=20", "model.add_bias_linear=true"},
           {"model.moe_router_score_function=sigmoid", "model.moe_aux_loss_coeff=0.1",
            "model.moe_z_loss_coeff=0.1"},
           {"model.moe_router_pre_softmax=true", "model.moe_router_topk=1",
            "model.moe_aux_loss_coeff=0.1", "model.moe_router_load_balancing_type=seq_aux_loss"},
           {"model.moe_expert_capacity_factor=1.5", "model.moe_pad_expert_input_to_capacity=true"},
           {"model.moe_expert_capacity_factor=1e30"},
           {"model.moe_token_dispatcher_type=allgather", "model.moe_router_topk_scaling_factor=2"},
           {"model.recompute_granularity=full", "model.recompute_num_layers=2"}})
    models.push_back(with({"model.num_experts=4"}, overrides));
  return models;
}

std::string text_of(const std::vector<std::string>& overrides) {
  return fmt::format("{}", fmt::join(overrides, " "));
}

TEST(MemoryPlan, ParametersAreThoseOfTheModel) {
  for (const auto& overrides : all_models()) {
    SCOPED_TRACE(text_of(overrides));
    const Config config = small(overrides);
    const auto planned = chunk_parameters(config, chunks_of_stage(config, 0).front());
    const auto model = model_of(config);
    const auto found = collect_parameters(*model);
    ASSERT_EQ(planned.size(), found.size());
    for (size_t i = 0; i < found.size(); ++i) {
      EXPECT_EQ(planned[i].name, found[i].name);
      EXPECT_EQ(planned[i].shape, found[i].tensor.sizes().vec()) << found[i].name;
      EXPECT_EQ(planned[i].shared_embedding, found[i].description.shared_embedding());
      EXPECT_EQ(planned[i].is_expert, found[i].description.is_expert);
    }
  }
}

/// Compares the plan with what rank `state.rank()` has allocated.
void expect_buffers(const Config& config, const ParallelState& state) {
  const StageMemory plan = plan_memory(config, state.world_size()).stages.at(0);
  GPTModel model(config.model, config.parallel, state, GPTStage::whole(config.model),
                 {.dtype = parameter_dtype(config.train.precision)});
  DistributedDataParallel ddp(
      model, state, config.ddp, /*disable_bucketing=*/false, [&](const NamedParameter& param) {
        return muon_updates(config.optimizer, param.name, param.tensor.dim(),
                            param.description.is_expert);
      });
  const auto optimizer = make_optimizer({&ddp}, config.optimizer);
  int64_t parameters = 0, parameter_bytes = 0, gradient_bytes = 0;
  for (const auto& buffer : ddp.buffers()) {
    parameter_bytes += static_cast<int64_t>(buffer->param_data().nbytes());
    gradient_bytes += static_cast<int64_t>(buffer->grad_data().nbytes());
    for (const NamedParameter& param : buffer->params()) parameters += param.tensor.numel();
  }
  EXPECT_EQ(plan.parameters, parameters);
  EXPECT_EQ(plan.parameter_bytes, parameter_bytes);
  EXPECT_EQ(plan.gradient_bytes, gradient_bytes);
  EXPECT_EQ(plan.optimizer_bytes, optimizer->state_bytes());
}

TEST(MemoryPlan, BuffersAndOptimizerStateAreWhatARunAllocates) {
  const std::vector<std::vector<std::string>> settings = {
      {},
      {"optimizer.optimizer=sgd"},
      {"optimizer.optimizer=sgd", "optimizer.sgd_momentum=0", "train.precision=fp16"},
      {"optimizer.optimizer=muon"},
      {"optimizer.optimizer=muon", "ddp.bucket_size=9000", "train.precision=bf16"},
      {"optimizer.exp_avg_dtype=bf16", "train.precision=bf16"},
      {"ddp.bucket_size=5000"},
      {"ddp.num_buckets=3", "ddp.grad_reduce_in_fp32=false"},
      {"ddp.use_distributed_optimizer=true"},
      {"ddp.use_distributed_optimizer=true", "ddp.bucket_size=5000"},
      {"ddp.use_distributed_optimizer=true", "ddp.num_buckets=4",
       "ddp.pad_buckets_for_high_nccl_busbw=true"},
      {"ddp.use_distributed_optimizer=true", "ddp.overlap_grad_reduce=false"},
      {"ddp.use_distributed_optimizer=true", "optimizer.optimizer=muon", "ddp.bucket_size=9000"},
  };
  for (const int64_t ranks : {1, 2, 3})
    for (const auto& setting : settings) {
      testing::run_ranks(ranks, [&](const ParallelState& state) {
        for (const size_t m : {0, 1, 2, 7, 10}) {
          std::vector<std::string> overrides = kModels[m];
          overrides.insert(overrides.end(), setting.begin(), setting.end());
          SCOPED_TRACE(text_of(overrides));
          expect_buffers(small(overrides), state);
        }
      });
    }
}

TEST(MemoryPlan, BuffersOfExpertsAreWhatARunAllocates) {
  const auto expect = [](int64_t ranks, const std::vector<std::string>& layout) {
    for (const auto& setting : std::vector<std::vector<std::string>>{
             {}, {"ddp.use_distributed_optimizer=true", "optimizer.optimizer=muon"}}) {
      const Config config =
          small(with(with({"model.num_experts=4", "model.add_bias_linear=true"}, layout), setting));
      testing::run_ranks(ranks, [&](const ParallelState& state) { expect_buffers(config, state); },
                         {.sizes = parallel_options(config, c10::kCPU).sizes});
    }
  };
  expect(1, {});
  expect(4, {"parallel.expert_model_parallel_size=2"});
  expect(4, {"parallel.tensor_model_parallel_size=2", "parallel.expert_model_parallel_size=2",
             "parallel.expert_tensor_parallel_size=1"});
  expect(2,
         {"parallel.tensor_model_parallel_size=2", "model.moe_shared_expert_intermediate_size=20"});
}

TEST(MemoryPlan, ActiveParametersLeaveOutTheExpertsThatATokenDoesNotGoTo) {
  const Config dense = small({"model.ffn_hidden_size=82"});
  const Config experts = small({"model.num_experts=6", "model.moe_ffn_hidden_size=40"});
  const int64_t expert = 3 * 48 * 40, layers = 3;
  EXPECT_EQ(num_active_parameters(dense), num_parameters(dense));
  EXPECT_EQ(num_active_parameters(experts), num_parameters(experts) - layers * 4 * expert);
  // A router has as many parameters as 6 / 3 more of width.
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

TEST(MemoryPlan, ActivationsAreWhatAutogradKeeps) {
  for (const auto& overrides : all_models()) {
    SCOPED_TRACE(text_of(overrides));
    const Config config = small(overrides);
    const auto model = model_of(config);
    for (const NamedParameter& param : collect_parameters(*model))
      at::Tensor(param.tensor).mutable_grad() = at::zeros_like(param.tensor);
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
    EXPECT_LT(static_cast<double>(counter.peak()), 1.01 * planned);
    // Where a large part of a layer is computed anew, those behind it are free already.
    const bool recomputed = config.model.recompute_granularity != RecomputeGranularity::none;
    const bool large = config.model.num_experts || config.model.attention_dropout > 0;
    const double least = recomputed && large ? 0.7 : 0.9;
    EXPECT_GT(static_cast<double>(counter.peak()), least * planned);
  }
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
           {"model.label_smoothing=0.1"},
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
  EXPECT_EQ(parameters({three}, 2), layer + 48 + table);  // the tied table is there twice
  const int64_t norms = 7 * 48;
  const std::string two = "parallel.tensor_model_parallel_size=2";
  EXPECT_EQ(parameters({two}, 0), (all - norms) / 2 + norms);
  EXPECT_EQ(parameters({two, "model.num_query_groups=1"}, 0),
            (parameters({"model.num_query_groups=1"}, 0) - norms) / 2 + norms);
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

TEST(MemoryPlan, MicrobatchesInFlight) {
  const auto layers_of = [](const std::vector<std::string>& overrides, size_t stage) {
    const Config config = small(overrides);
    const StageMemory memory = plan_memory(config).stages.at(stage);
    int64_t rest = 0, layers = 0, first = static_cast<int64_t>(stage);
    for (const ModelChunk& chunk : chunks_of_stage(config, first)) {
      const ActivationPlan plan = plan_activations(config, chunk, first);
      rest += plan.ends + plan.working + rotary_table_bytes(config, chunk);
      layers = plan.layers;
    }
    return static_cast<double>(memory.activation_bytes - rest) / static_cast<double>(layers);
  };
  std::vector<std::string> overrides = {"parallel.pipeline_model_parallel_size=3",
                                        "train.global_batch_size=30"};
  EXPECT_EQ(layers_of(overrides, 0), 3);
  EXPECT_EQ(layers_of(overrides, 1), 2);
  EXPECT_EQ(layers_of(overrides, 2), 1);
  overrides.back() = "train.global_batch_size=6";
  EXPECT_EQ(layers_of(overrides, 0), 2);
  overrides = {"parallel.pipeline_model_parallel_size=3", "train.global_batch_size=36",
               "parallel.virtual_pipeline_model_parallel_size=2", "model.num_layers=6"};
  EXPECT_EQ(layers_of(overrides, 0), 8);
  EXPECT_EQ(layers_of(overrides, 2), 4);
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
