// Families of published models train the same on every layout: ten steps against one process.

#include <gtest/gtest.h>

#include "lockstep/tests/training/layout_curves.h"

namespace lockstep {
namespace {

using FamilyLayoutsTest = testing::LayoutCurvesTest;
using Fields = std::vector<std::string>;

Fields both(Fields first, const Fields& more) {
  first.insert(first.end(), more.begin(), more.end());
  return first;
}

const Fields kShortContext = {"model.rope_original_max_position_embeddings=8"};
const Fields kLlama3 = both({"model.num_query_groups=2", "model.rope_scaling_type=llama3",
                             "model.untie_embeddings_and_output_weights=true"},
                            kShortContext);
const Fields kMistral = {"model.num_query_groups=2", "model.window_size=5"};
const Fields kQwen2 = {"model.num_query_groups=1", "model.add_qkv_bias=true"};
const Fields kQwen3 = {"model.num_query_groups=1", "model.qk_layernorm=true",
                       "model.kv_channels=8"};
const Fields kGpt2 = {"model.position_embedding_type=learned_absolute",
                      "model.normalization=LayerNorm", "model.add_bias_linear=true",
                      "model.activation=gelu_tanh"};
const Fields kMixtral = {"model.num_query_groups=2", "model.num_experts=4", "model.window_size=7"};
const Fields kQwen3Moe = {"model.num_query_groups=2",
                          "model.qk_layernorm=true",
                          "model.num_experts=4",
                          "model.moe_ffn_hidden_size=8",
                          "model.moe_router_pre_softmax=true",
                          "model.moe_layer_freq=[0, 1]"};
const Fields kLatent = {"model.multi_latent_attention=true",
                        "model.qk_layernorm=true",
                        "model.kv_lora_rank=6",
                        "model.qk_head_dim=4",
                        "model.qk_pos_emb_head_dim=2",
                        "model.v_head_dim=5",
                        "model.untie_embeddings_and_output_weights=true"};
const Fields kDeepSeek = both(
    kLatent,
    {"model.q_lora_rank=8", "model.rope_scaling_type=yarn", "model.rope_mscale_all_dim=1",
     "model.rope_original_max_position_embeddings=8", "model.num_experts=8",
     "model.moe_ffn_hidden_size=8", "model.moe_shared_expert_intermediate_size=8",
     "model.moe_router_score_function=sigmoid", "model.moe_router_enable_expert_bias=true",
     "model.moe_router_topk=4", "model.moe_router_num_groups=4", "model.moe_router_group_topk=2",
     "model.moe_router_topk_scaling_factor=2.5", "model.moe_layer_freq=[0, 1]"});
const Fields kSharded = {"ddp.use_distributed_optimizer=true"};

const char* const kTensorRanks = "tensor_model_parallel_size=2";

TEST_F(FamilyLayoutsTest, DenseFamilies) {
  for (const Fields& family : {kLlama3, kMistral, kQwen2, kQwen3, kGpt2}) {
    SCOPED_TRACE(family.back());
    expect_equal_to_one_process(family, 2, {kTensorRanks});
    expect_equal_to_one_process(family, 2, {kTensorRanks, "sequence_parallel=true"});
    expect_equal_to_one_process(family, 2, {"pipeline_model_parallel_size=2"});
    expect_equal_to_one_process(family, 2, {"context_parallel_size=2"});
    expect_equal_to_one_process(both(family, kSharded), 2, {});
  }
}

TEST_F(FamilyLayoutsTest, FamiliesWithExperts) {
  for (const Fields& family : {kMixtral, kQwen3Moe, kDeepSeek}) {
    SCOPED_TRACE(family.back());
    expect_equal_to_one_process(family, 2, {kTensorRanks});
    expect_equal_to_one_process(family, 2, {"pipeline_model_parallel_size=2"});
    expect_equal_to_one_process(family, 2, {"context_parallel_size=2"});
    expect_equal_to_one_process(family, 2, {"expert_model_parallel_size=2"});
    expect_equal_to_one_process(both(family, kSharded), 2, {});
  }
}

TEST_F(FamilyLayoutsTest, LatentAttention) {
  const Fields selective = {"model.recompute_granularity=selective"};
  expect_equal_to_one_process(kLatent, 4,
                              {"tensor_model_parallel_size=4", "sequence_parallel=true"});
  for (const char* const kind : {"all_gather", "a2a"})
    expect_equal_to_one_process(
        both(kLatent, selective), 4,
        {kTensorRanks, "context_parallel_size=2", std::string("cp_comm_type=") + kind});
  expect_equal_to_one_process(
      both(kLatent, {"model.recompute_granularity=full", "model.window_size=5"}), 2,
      {"context_parallel_size=2"});
  expect_equal_to_one_process(kLatent, 2,
                              {"pipeline_model_parallel_size=2", "pipeline_schedule=zb-h1"});
  expect_equal_to_one_process(
      both(kDeepSeek, kSharded), 4,
      {kTensorRanks, "sequence_parallel=true", "expert_model_parallel_size=2",
       "expert_tensor_parallel_size=1", "pipeline_model_parallel_size=2"});
}

TEST_F(FamilyLayoutsTest, MoreRanksThanGroups) {
  for (const Fields& family : {kQwen2, kQwen3}) {
    expect_equal_to_one_process(family, 4, {"tensor_model_parallel_size=4"});
    expect_equal_to_one_process(
        both(family, kSharded), 4,
        {kTensorRanks, "context_parallel_size=2", "sequence_parallel=true"});
  }
}

TEST_F(FamilyLayoutsTest, AWindowOverEveryKindOfContextParallelism) {
  for (const char* const kind : {"cp_comm_type=all_gather", "cp_comm_type=a2a"})
    expect_equal_to_one_process(kMistral, 2, {"context_parallel_size=2", kind});
  expect_equal_to_one_process(kMistral, 4, {"context_parallel_size=4"});
  expect_equal_to_one_process(both(kMistral, {"model.recompute_granularity=selective"}), 2,
                              {"context_parallel_size=2"});
}

}  // namespace
}  // namespace lockstep
