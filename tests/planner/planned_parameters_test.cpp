// The planner's list of parameters equals the one that the model of every rank registers: names in
// order, shapes, descriptions.

#include <gtest/gtest.h>

#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/models/gpt_model.h"
#include "lockstep/planner/memory_plan.h"
#include "lockstep/planner/stage_shapes.h"
#include "lockstep/training/run_setup.h"

namespace lockstep {
namespace {

constexpr const char* kPlanned = R"(
  model { num_layers: 4 hidden_size: 16 num_attention_heads: 4 ffn_hidden_size: 24 seq_length: 16
          vocab_size: 37 }
  train { micro_batch_size: 1 global_batch_size: 8 }
)";

using Settings = std::vector<std::string>;

const std::string kBias = "model.add_bias_linear=true", kGelu = "model.activation=gelu",
                  kUntied = "model.untie_embeddings_and_output_weights=true",
                  kLayerNorm = "model.normalization=LayerNorm", kExperts = "model.num_experts=4",
                  kTwo = "parallel.tensor_model_parallel_size=2",
                  kSequence = "parallel.sequence_parallel=true",
                  kStages = "parallel.pipeline_model_parallel_size=2";

const std::vector<Settings> kDenseModels = {
    {},
    {"model.num_query_groups=2", kBias, kGelu},
    {"model.num_query_groups=1", kUntied, "model.add_qkv_bias=true"},
    {"model.num_query_groups=1", "model.qk_layernorm=true"},
    {kLayerNorm, "model.position_embedding_type=learned_absolute",
     "model.make_vocab_size_divisible_by=8"},
    {"model.multi_latent_attention=true", "model.qk_layernorm=true", "model.q_lora_rank=10",
     kUntied},
    {"model.multi_latent_attention=true", "model.kv_lora_rank=10"},
};

const std::vector<Settings> kDenseLayouts = {
    {},
    {kTwo},
    {kTwo, kSequence},
    {"parallel.tensor_model_parallel_size=4"},
    {"parallel.context_parallel_size=2"},
    {kStages},
    {kStages, "parallel.virtual_pipeline_model_parallel_size=2"},
    {kTwo, kSequence, kStages},
};

const std::vector<Settings> kExpertModels = {
    {kExperts},
    {kExperts, kBias, "model.moe_shared_expert_intermediate_size=12"},
    {kExperts, kGelu, kUntied, "model.moe_layer_freq=2", "model.moe_ffn_hidden_size=8"},
};

const std::vector<Settings> kExpertLayouts = {
    {},
    {"parallel.expert_model_parallel_size=4"},
    {kTwo},
    {kTwo, kSequence, "parallel.expert_model_parallel_size=2",
     "parallel.expert_tensor_parallel_size=1"},
    {"parallel.expert_tensor_parallel_size=2", "parallel.expert_model_parallel_size=2"},
    {kTwo, kStages, "parallel.expert_model_parallel_size=2",
     "parallel.virtual_pipeline_model_parallel_size=2"},
};

std::string line_of(const std::string& name, at::IntArrayRef shape,
                    const ParamDescription& description) {
  return fmt::format("{} [{}] {}", name, fmt::join(shape, ", "), description.to_string());
}

std::vector<std::string> planned_lines(const Config& config, const ModelChunk& chunk) {
  std::vector<std::string> lines;
  for (const ShapedParameter& param : chunk_parameters(config, chunk))
    lines.push_back(line_of(param.name, param.shape, param.description));
  return lines;
}

std::vector<std::string> registered_lines(const Config& config, const ModelChunk& chunk,
                                          const ParallelState& state) {
  const GPTModel model(config.model, config.parallel, state, chunk.stage());
  std::vector<std::string> lines;
  for (const NamedParameter& param : collect_parameters(model))
    lines.push_back(line_of(param.name, param.tensor.sizes(), param.description));
  return lines;
}

/// Compares every rank of the smallest world. Returns how many parameters were compared.
int64_t expect_planned(const Config& config) {
  ParallelSizes sizes = parallel_options(config, c10::kCPU).sizes;
  sizes.world_size = plan_memory(config).world_size;
  int64_t compared = 0;
  for (int64_t rank = 0; rank < sizes.world_size; ++rank) {
    const auto state = ParallelState::planning_rank(sizes, rank);
    for (const ModelChunk& chunk : chunks_of_stage(config, state.group(GroupKind::pp).rank())) {
      const auto planned = planned_lines(config, chunk);
      EXPECT_EQ(planned, registered_lines(config, chunk, state)) << "rank " << rank;
      compared += static_cast<int64_t>(planned.size());
    }
  }
  return compared;
}

int64_t expect_matrix(const std::vector<Settings>& models, const std::vector<Settings>& layouts) {
  int64_t compared = 0;
  for (const Settings& model : models)
    for (const Settings& layout : layouts) {
      Settings all = model;
      all.insert(all.end(), layout.begin(), layout.end());
      SCOPED_TRACE(fmt::format("{}", fmt::join(all, " ")));
      compared += expect_planned(parse_config(kPlanned, "planned", all));
    }
  return compared;
}

TEST(PlannedParameters, AreThoseOfEveryRankOfADenseModel) {
  EXPECT_GT(expect_matrix(kDenseModels, kDenseLayouts), 2000);
}

TEST(PlannedParameters, AreThoseOfEveryRankOfAModelWithExperts) {
  EXPECT_GT(expect_matrix(kExpertModels, kExpertLayouts), 2000);
}

// Written out, so that the list and the model cannot be wrong together.
TEST(PlannedParameters, OfALayerWithExpertsOnARankOfEightAreTheseBlocks) {
  const Config config = parse_config(
      kPlanned, "planned",
      {kExperts, kBias, kTwo, kSequence, kStages, "parallel.expert_model_parallel_size=2",
       "parallel.expert_tensor_parallel_size=2", "model.moe_shared_expert_intermediate_size=12",
       "model.moe_ffn_hidden_size=8"});
  std::vector<std::string> found;
  for (const ShapedParameter& param : chunk_parameters(config, {.first_layer = 3, .num_layers = 1}))
    found.push_back(fmt::format("{} [{}]", param.name, fmt::join(param.shape, ", ")));
  const std::string layer = "decoder.layers.3.";
  const std::vector<std::string> expected = {
      layer + "input_layernorm.weight [16]",
      layer + "self_attention.linear_qkv.weight [24, 16]",
      layer + "self_attention.linear_qkv.bias [24]",
      layer + "self_attention.linear_proj.weight [16, 8]",
      layer + "self_attention.linear_proj.bias [16]",
      layer + "pre_mlp_layernorm.weight [16]",
      layer + "mlp.router.weight [4, 16]",
      layer + "mlp.experts.linear_fc1.weight [2, 2, 4, 16]",
      layer + "mlp.experts.linear_fc1.bias [2, 2, 4]",
      layer + "mlp.experts.linear_fc2.weight [2, 16, 4]",
      layer + "mlp.experts.linear_fc2.bias [2, 16]",
      layer + "mlp.shared_experts.linear_fc1.weight [2, 6, 16]",
      layer + "mlp.shared_experts.linear_fc1.bias [2, 6]",
      layer + "mlp.shared_experts.linear_fc2.weight [16, 6]",
      layer + "mlp.shared_experts.linear_fc2.bias [16]",
  };
  EXPECT_EQ(found, expected);
}

}  // namespace
}  // namespace lockstep
